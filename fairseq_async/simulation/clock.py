"""The virtual clock: what is to happen, in order."""

import heapq
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """Of what happens at one moment, a worker's end comes before what it would have sent, and a grace period that ends
    takes in what arrives at that moment."""

    JOINS = 0
    DIES = 1
    ARRIVES = 2
    IS_TAKEN = 3  # an update that stood in line
    GRACE_ENDS = 4


@dataclass(frozen=True, order=True)
class Happening:
    """One thing that happens to one worker. ``life`` says to which of its lives it belongs: what a dead one had sent
    does not arrive."""

    time: float
    kind: Kind
    worker: int
    life: int = 0


class Clock:
    """An event queue; the time is that of the last event, in seconds. Equal moments come in one fixed order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[Happening] = []

    def schedule(self, happening: Happening) -> None:
        heapq.heappush(self._queue, happening)

    def next(self) -> Happening | None:
        """Goes on to what happens next; None when there is nothing left."""
        if not self._queue:
            return None
        happening = heapq.heappop(self._queue)
        self.now = max(self.now, happening.time)
        return happening

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, "queue": [[each.time, int(each.kind), each.worker, each.life] for each in self._queue]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state["now"]
        self._queue = [Happening(time, Kind(kind), worker, life) for time, kind, worker, life in state["queue"]]
        heapq.heapify(self._queue)
