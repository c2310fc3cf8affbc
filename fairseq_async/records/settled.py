"""Updates that a server has settled, as its log records them."""

from dataclasses import dataclass
from typing import Literal

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Report
from fairseq_async.protocol.receipt import Receipt


@dataclass(frozen=True)
class ControlEvent:
    """A change of a rule's round size, or an epoch's begin or end, between two updates. A replay repeats it."""

    event: Literal["limit_round", "begin_epoch", "end_epoch"]
    updates: int | None = None
    epoch: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Settled:
    """An update that was settled, for the log.

    Attributes:
        held_seconds: how long it waited for others; 0 if it did not wait.
        merged: the versions made by merging parameters of a server above since the update before.
    """

    receipt: Receipt
    report: Report
    control_events: tuple[ControlEvent, ...] = ()
    held_seconds: float = 0.0
    merged: tuple[int, ...] = ()

    @property
    def recorded(self) -> JsonObject:
        """The fields for its line in the log besides those of receipt and report."""
        own: JsonObject = {}
        if self.held_seconds:
            own["held_seconds"] = self.held_seconds
        if self.merged:
            own["merged"] = list(self.merged)
        return own
