"""What a simulation runs and records: one method on one cluster."""

from typing import Protocol

from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.method_spec import MethodSpec
from fairseq_async.simulation.workers import SharedModel


class SimulatedRun(Protocol):
    """A run under a virtual clock, with one server or a hierarchy of them.

    Attributes:
        spec: the description that a real run writes into ``run.json``.
        parameters: those that are trained, flat.
        steps, tokens: taken so far, by all workers.
        now: virtual seconds.
        version: of the parameters.
        sequences: the last settled update of each worker.
        diverged: updates keep having NaN or Inf.
    """

    spec: MethodSpec
    model: SharedModel
    parameters: Tensor

    @property
    def steps(self) -> int: ...

    @property
    def tokens(self) -> float: ...

    @property
    def now(self) -> float: ...

    @property
    def version(self) -> int: ...

    @property
    def sequences(self) -> dict[int, int]: ...

    @property
    def finished(self) -> bool: ...

    @property
    def diverged(self) -> bool: ...

    def advance(self) -> bool:
        """The next thing that happens; False when nothing will."""
        ...

    def evaluate(self) -> float:
        """The loss of the parameters."""
        ...

    def state_dict(self) -> State:
        """All of it, between two calls of :meth:`advance`, in types that torch loads without trust."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Goes on where :meth:`state_dict` was taken, to the bit."""
        ...
