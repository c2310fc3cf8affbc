"""The outcome of a call of the coordinator: the updates that were settled, and the answers to workers."""

from dataclasses import dataclass, field
from typing import Literal

from fairseq_async.method_spec import JsonObject
from fairseq_async.server.protocol import Assignment, Report
from fairseq_async.server.receipt import Receipt


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


@dataclass(frozen=True)
class Instruction:
    """The answer to one worker: the receipt of its update, if the worker waits for one, and its next work."""

    worker: int
    receipt: Receipt | None
    assignment: Assignment
    finished: bool


@dataclass
class Outcome:
    """The outcome of a call of the coordinator: updates to be logged, then workers to be answered, both in order.

    Attributes:
        failures: workers for which the plan failed, at counting the report or at finding work, and why. Their updates
            are settled like the others'; a failed worker without an instruction has no answer yet.
    """

    settled: list[Settled] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    failures: list[tuple[int, Exception]] = field(default_factory=list)

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.settled + other.settled,
            self.instructions + other.instructions,
            self.failures + other.failures,
        )
