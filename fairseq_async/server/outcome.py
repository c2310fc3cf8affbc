"""The outcome of a call of the coordinator: the updates that were settled, and the answers to workers."""

from dataclasses import dataclass, field

from fairseq_async.protocol import Assignment
from fairseq_async.protocol.receipt import Receipt
from fairseq_async.records.event_log import Settled


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
