"""What a region's server is to the global one, of which it is a worker (HALoS): without a socket or a thread."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fairseq_async.algorithms import Region
from fairseq_async.algorithms.rule import State
from fairseq_async.global_server import GlobalServer
from fairseq_async.method_spec import MOST_LOCAL_STEPS
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.outcome import Settled
from fairseq_async.server.receipt import SETTLED, Status


@dataclass(frozen=True)
class Drift:
    """How far a region's workers have moved its parameters: δ, an update for the global server.

    Attributes:
        sequence: the region's own number for it.
        base_version: of the global parameters that were merged last.
        steps: local steps that are reported with it.
        seconds: for one of them.
        values: flat.
    """

    sequence: int
    base_version: int
    steps: int
    seconds: float
    values: Tensor


@dataclass(frozen=True)
class Above:
    """What the global server has answered, or welcomed the region with.

    Attributes:
        sequence: the number of the region's next update.
        version: of the parameters.
        finished: the global run is over.
        values: its parameters, flat.
    """

    sequence: int
    version: int
    finished: bool
    values: Tensor


@dataclass(frozen=True)
class Lost:
    """The global server does not take this region, or not any more; ``reason`` is one line."""

    reason: str


@dataclass(frozen=True)
class Left:
    """The region has left the global run."""


News = Above | Lost | Left


class Link(Protocol):
    """The connection to the global server. Its methods return at once; what they lead to is news."""

    def join(self, parameters: Tensor, patient: bool) -> None:
        """Joins, and brings these parameters where the global server has none.

        Args:
            patient: a server that is not there is waited for, without end.
        """
        ...

    def send(self, drift: Drift) -> None:
        """Sends an update."""
        ...

    def leave(self) -> None:
        """Leaves for good."""
        ...

    def news(self) -> News | None:
        """What was not told yet."""
        ...


class Upstream:
    """One region's part of :class:`~fairseq_async.algorithms.Region`, and its numbers with the global server.

    A region that goes on from a snapshot may find that the global server has had more of it than the snapshot knows.
    What was moved until then counts there, so it is sent no second time: the region merges, and counts anew.

    Args:
        coordinator: of the region's own server.

    Attributes:
        joined: the global server has this region.
        finished: the global run is over, or lost to this region: nothing is sent any more.
        drift: what is on its way; it goes again, with the same number, where it was not settled.
    """

    def __init__(self, above: GlobalServer, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.level = Region(coordinator.server.parameters, above.updates, above.merge)
        self.joined = self.finished = False
        self.drift: Drift | None = None
        self._sequence = self._version = self._unreported = 0
        self._sent_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send, and no answer to come."""
        return self.finished or (self.joined and self.drift is None and not self.level.count)

    def count(self, settled: list[Settled]) -> None:
        """Counts what the region's workers have sent."""
        for each in settled:
            if each.receipt.status is Status.APPLIED:
                self.level.note_update()
            if each.receipt.status in SETTLED:
                self._unreported += each.report.local_steps or 0

    def due(self, now: float) -> Drift | None:
        """δ, if it is time to send it: after K updates, and what is left when the region's workers are through."""
        left = self.coordinator.finished and self.level.count > 0
        if not self.joined or self.finished or self.drift is not None or not (self.level.due or left):
            return None
        steps = min(self._unreported, MOST_LOCAL_STEPS)
        self._unreported -= steps
        seconds, self._sent_at = (now - self._sent_at) / max(1, steps), now
        values = self.level.send(self.coordinator.server.parameters)
        self.drift = Drift(self._sequence, self._version, steps, max(0.0, seconds), values)
        return self.drift

    def join(self, above: Above, now: float, fresh: bool) -> None:
        """The global server has this region; :attr:`drift` is to be sent again.

        Args:
            fresh: the region's parameters are the global server's.
        """
        settled = above.sequence > self._sequence and not fresh
        unknown = above.sequence - self._sequence - (self.drift is not None)  # messages later than the snapshot
        if settled and unknown > 0:
            self._unreported = 0  # they have reported it
        self.joined, self._sent_at, self._sequence = True, now, above.sequence
        if settled:
            return self.merge(above)
        self._version = above.version if fresh else min(self._version, above.version)
        self.finished = above.finished
        if (drift := self.drift) is not None:
            self.drift = Drift(self._sequence, self._version, drift.steps, drift.seconds, drift.values)

    def merge(self, above: Above) -> None:
        """Takes the global server's parameters in."""
        self.coordinator.merge(self.level, above.values)
        self.drift = None
        self._sequence, self._version, self.finished = above.sequence, above.version, above.finished

    def lose(self) -> None:
        """The region goes on alone."""
        self.finished, self.drift = True, None

    def state_dict(self) -> State:
        """What another server of the region needs to go on."""
        own = {"level": self.level.state_dict(), "sequence": self._sequence, "version": self._version}
        drift = None
        if self.drift is not None:
            drift = {"steps": self.drift.steps, "seconds": self.drift.seconds, "values": self.drift.values}
        return own | {"unreported": self._unreported, "drift": drift}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        self.level.load_state_dict(state["level"])
        self._sequence, self._version, self._unreported = state["sequence"], state["version"], state["unreported"]
        self.drift = None if state["drift"] is None else Drift(self._sequence, self._version, **state["drift"])
