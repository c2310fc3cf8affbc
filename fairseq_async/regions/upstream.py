"""A region's server as a worker of the global server (HALoS), without sockets or threads."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fairseq_async.algorithms import Region
from fairseq_async.algorithms.rule import State
from fairseq_async.method.global_server import GlobalServer
from fairseq_async.method.spec import MOST_LOCAL_STEPS
from fairseq_async.protocol.receipt import SETTLED, Status
from fairseq_async.records.event_log import Settled
from fairseq_async.server.coordinator import Coordinator


@dataclass(frozen=True)
class RegionUpdate:
    """An update for the global server: δ, how far a region's workers have moved its parameters.

    Attributes:
        sequence: the region's own number for the update.
        base_version: version of the global parameters that were merged last.
        steps: number of local steps that are reported with the update.
        seconds: time of one of these steps.
        values: δ as a flat tensor.
    """

    sequence: int
    base_version: int
    steps: int
    seconds: float
    values: Tensor


@dataclass(frozen=True)
class GlobalParameters:
    """An answer of the global server to an update, or its welcome to the region.

    Attributes:
        sequence: the number of the region's next update.
        version: version of the global parameters.
        finished: whether the global run is over.
        values: the global parameters, flat.
    """

    sequence: int
    version: int
    finished: bool
    values: Tensor


@dataclass(frozen=True)
class RegionLost:
    """The global server does not accept this region, or no longer does; ``reason`` is one line."""

    reason: str


@dataclass(frozen=True)
class RegionLeft:
    """The region has left the global run."""


News = GlobalParameters | RegionLost | RegionLeft


class GlobalServerLink(Protocol):
    """The connection to the global server. Its methods return at once; their results come later, as news."""

    def join(self, parameters: Tensor, patient: bool) -> None:
        """Joins the global run, and brings these parameters if the global server has none.

        Args:
            patient: whether to wait, without end, for a server that is not there.
        """
        ...

    def send(self, drift: RegionUpdate) -> None:
        """Sends an update to the global server."""
        ...

    def leave(self) -> None:
        """Leaves the global run for good."""
        ...

    def news(self) -> News | None:
        """Returns the next news that was not returned yet; None if there is none."""
        ...


class Upstream:
    """One region's side of the exchange with the global server: its :class:`~fairseq_async.algorithms.Region`, and its
    sequence number and version there.

    A region that goes on from a snapshot may find that the global server has had later updates of it than the snapshot.
    They count there, so the region must not send their change again: it merges the global parameters and counts anew.

    Args:
        coordinator: the coordinator of the region's own server.

    Attributes:
        joined: whether the global server has welcomed this region.
        finished: whether the global run is over, or lost to this region: nothing is sent any more.
        drift: the update that is on its way; it is sent again where it was not settled, with the number that the
            global server expects.
    """

    def __init__(self, above: GlobalServer, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.region = Region(coordinator.server.parameters, above.updates, above.merge)
        self.joined = self.finished = False
        self.drift: RegionUpdate | None = None
        self._sequence = self._version = self._unreported = 0
        self._sent_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send, and no answer is awaited."""
        return self.finished or (self.joined and self.drift is None and not self.region.count)

    def count(self, settled: list[Settled]) -> None:
        """Counts settled updates of the region's workers."""
        for each in settled:
            if each.receipt.status is Status.APPLIED:
                self.region.note_update()
            if each.receipt.status in SETTLED:
                self._unreported += each.report.local_steps or 0

    def due(self, now: float) -> RegionUpdate | None:
        """Returns δ if it is to be sent now, after K updates or, for the rest, at the region's end; else None."""
        left = self.coordinator.finished and self.region.count > 0
        if not self.joined or self.finished or self.drift is not None or not (self.region.due or left):
            return None
        steps = min(self._unreported, MOST_LOCAL_STEPS)
        self._unreported -= steps
        seconds, self._sent_at = (now - self._sent_at) / max(1, steps), now
        values = self.region.send(self.coordinator.server.parameters)
        self.drift = RegionUpdate(self._sequence, self._version, steps, max(0.0, seconds), values)
        return self.drift

    def join(self, above: GlobalParameters, now: float, fresh: bool) -> None:
        """Continues from the global server's welcome. A :attr:`drift` that is left afterwards has to be sent again.

        Args:
            fresh: whether the region has just begun with the global server's parameters.
        """
        settled = above.sequence > self._sequence and not fresh
        unknown = above.sequence - self._sequence - (self.drift is not None)  # updates sent after the snapshot
        if settled and unknown > 0:
            self._unreported = 0  # these updates have reported the steps
        self.joined, self._sent_at, self._sequence = True, now, above.sequence
        if settled:
            return self.merge(above)
        self._version = above.version if fresh else min(self._version, above.version)
        self.finished = above.finished
        if (drift := self.drift) is not None:
            self.drift = RegionUpdate(self._sequence, self._version, drift.steps, drift.seconds, drift.values)

    def merge(self, above: GlobalParameters) -> None:
        """Merges the global server's parameters into the region's, after which :attr:`drift` is settled."""
        self.coordinator.merge(self.region, above.values)
        self.drift = None
        self._sequence, self._version, self.finished = above.sequence, above.version, above.finished

    def lose(self) -> None:
        """Lets the region go on alone, without the global server."""
        self.finished, self.drift = True, None

    def state_dict(self) -> State:
        """Returns all that another server of the region needs to go on."""
        own = {"level": self.region.state_dict(), "sequence": self._sequence, "version": self._version}
        drift = None
        if self.drift is not None:
            drift = {"steps": self.drift.steps, "seconds": self.drift.seconds, "values": self.drift.values}
        return own | {"unreported": self._unreported, "drift": drift}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        self.region.load_state_dict(state["level"])
        self._sequence, self._version, self._unreported = state["sequence"], state["version"], state["unreported"]
        self.drift = None if state["drift"] is None else RegionUpdate(self._sequence, self._version, **state["drift"])
