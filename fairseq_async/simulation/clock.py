"""The virtual clock of a simulation: a queue of scheduled events."""

import heapq
import math
from enum import IntEnum
from typing import NamedTuple, TypedDict


class EventKind(IntEnum):
    """The kind of a scheduled event.

    Events at the same moment happen in the order of their kinds, and results depend on it: a worker that dies sends
    nothing any more, and a grace period that ends still includes the updates that arrive at that moment.
    """

    JOINS = 0
    DIES = 1
    ARRIVES = 2
    IS_TAKEN = 3  # the server starts on an update that had to queue
    GRACE_ENDS = 4
    PULLS = 5  # the worker's request for the parameters reaches the server; only in scripts/bench/server_queue.py


class ScheduledEvent(NamedTuple):
    """An event that is going to happen, in most cases to one worker.

    It is a tuple, whose order is the clock's, to be compared fast.

    Attributes:
        time: virtual seconds.
        incarnation: the worker's when the event was scheduled; an update of a worker that has died since does not
            arrive.
    """

    time: float
    kind: EventKind
    worker: int
    incarnation: int = 0


class ClockState(TypedDict):
    """The state of a :class:`Clock` in a saved simulation. An event is [time, kind, worker, incarnation]."""

    now: float
    queue: list[tuple[float, int, int, int]]


class Clock:
    """A queue of events in the order of their time; events at the same moment come in one fixed order.

    Attributes:
        now: the time of the last event, in virtual seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[ScheduledEvent] = []

    @property
    def upcoming(self) -> float:
        """The time of the next event; infinity where there is none."""
        return self._queue[0].time if self._queue else math.inf

    def schedule(self, event: ScheduledEvent) -> None:
        """Adds an event to the queue."""
        heapq.heappush(self._queue, event)

    def next(self) -> ScheduledEvent | None:
        """Removes the next event and moves the time to it; None when there is none left."""
        if not self._queue:
            return None
        event = heapq.heappop(self._queue)
        self.now = max(self.now, event.time)
        return event

    def state_dict(self) -> ClockState:
        """Returns the time and the queue."""
        queue = [(each.time, int(each.kind), each.worker, each.incarnation) for each in self._queue]
        return {"now": self.now, "queue": queue}

    def load_state_dict(self, state: ClockState) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.now = state["now"]
        self._queue = [
            ScheduledEvent(time, EventKind(kind), worker, incarnation)
            for time, kind, worker, incarnation in state["queue"]
        ]
        heapq.heapify(self._queue)
