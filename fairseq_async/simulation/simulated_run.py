"""The interface of what a simulation runs and records: one method on one cluster."""

from typing import Protocol

from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.method.spec import MethodSpec
from fairseq_async.simulation.workers import SharedModel


class SimulatedRun(Protocol):
    """A run under a virtual clock, with one server or a hierarchy of them.

    Attributes:
        spec: the description that a real run writes into ``run.json``.
        parameters: the parameters that are trained, flat.
        steps, tokens: numbers of steps and tokens so far, of all workers.
        now: the time in virtual seconds.
        version: version of the parameters.
        sequences: sequence number of the last settled update of each worker.
        diverged: whether several updates of a worker were refused, as those with NaN or Inf are.
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
        """Processes the next event; returns False when there is none."""
        ...

    def evaluate(self) -> float:
        """Returns the loss of the parameters."""
        ...

    def state_dict(self) -> State:
        """Returns the whole state, between two calls of :meth:`advance`; torch loads it with ``weights_only``."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned; the run goes on from there, the same to the bit."""
        ...
