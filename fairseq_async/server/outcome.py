"""What an event has led to in a coordinator: updates that were settled, and what workers are told."""

from dataclasses import dataclass, field

from fairseq_async.method_spec import JsonObject
from fairseq_async.server.protocol import Assignment, Report
from fairseq_async.server.receipt import Receipt


@dataclass(frozen=True)
class ControlEvent:
    """What a rule or schedule was told between two updates; a replay repeats it."""

    event: str  # limit_round, begin_epoch, end_epoch
    updates: int | None = None
    epoch: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Settled:
    """An update that was settled, for the log.

    Attributes:
        held_seconds: for which it waited for others; 0 where it did not.
        merged: the versions that the parameters of a server above have made since the update before.
    """

    receipt: Receipt
    report: Report
    control_events: tuple[ControlEvent, ...] = ()
    held_seconds: float = 0.0
    merged: tuple[int, ...] = ()

    @property
    def recorded(self) -> JsonObject:
        """What of it is in the log beside receipt and report."""
        own: JsonObject = {"held_seconds": self.held_seconds} if self.held_seconds else {}
        return own | {"merged": list(self.merged)} if self.merged else own


@dataclass(frozen=True)
class Instruction:
    """What one worker is told: what became of its update, if it waits for that, and its next work."""

    worker: int
    receipt: Receipt | None
    assignment: Assignment
    finished: bool


@dataclass
class Outcome:
    """What an event has led to: updates to be logged, then workers to be answered, both in order.

    Attributes:
        failures: workers whose report the plan could not count, or for whom it has found no work, and why. Their
            updates are settled like the others'; who is in no instruction has no answer yet.
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
