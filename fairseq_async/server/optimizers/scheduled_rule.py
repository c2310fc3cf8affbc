"""A gradient rule whose optimizer follows a learning-rate schedule."""

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError
from fairseq_async.options.config import HybridOptions
from fairseq_async.server.plan import whole_steps


class Schedule(Protocol):
    """The learning-rate schedule of an optimizer that steps in the server."""

    @property
    def learning_rate(self) -> float: ...

    def follow(self, steps: int) -> None:
        """Sets the optimizer's learning rate for the step after so many complete steps."""
        ...

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Ends an epoch; ``loss`` is the validation loss at its end."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class ScheduledRule(HybridAccumulation):
    """Hybrid accumulation that counts the steps of its optimizer, and lets a schedule set the learning rate of the
    next one.

    Args:
        rest: as of :class:`~fairseq_async.algorithms.HybridAccumulation`.

    Attributes:
        steps: number of the optimizer's steps so far; a partial step counts as its part.
    """

    def __init__(self, optimizer: Optimizer, updates_per_step: int, schedule: Schedule, **rest: Any) -> None:
        super().__init__(optimizer, updates_per_step, **rest)
        self.schedule, self.steps = schedule, 0.0
        schedule.follow(0)

    @classmethod
    def of(
        cls, options: HybridOptions, workers: int, optimizer: Optimizer, schedule: Schedule, **rest: Any
    ) -> "ScheduledRule":
        """Returns the rule of a run of hybrid asynchronous SGD, for which so many workers were announced."""
        rest["micro_batches"] = options.micro_batches if options.shares == "auto" else 1
        updates, partial = options.updates_per_step or workers, options.closes_early
        return cls(optimizer, updates, schedule, partial_steps=partial, **rest)

    @property
    def learning_rate(self) -> float:
        return self.schedule.learning_rate

    def begin_epoch(self, epoch: int) -> None:
        """Tells the schedule that worker 0 begins an epoch."""
        self.schedule.begin_epoch(epoch)
        self._follow()

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Tells the schedule that worker 0 has ended an epoch, with this validation loss."""
        self.schedule.end_epoch(epoch, loss)
        self._follow()

    def close(self, norm: Tensor | None = None) -> float:
        share = super().close(norm)
        if share:
            self.steps += share
            self._follow()
        return share

    def state_dict(self) -> State:
        return super().state_dict() | {"steps": self.steps, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a state. With None for the schedule in it, as after ``--reset-lr-scheduler``, the schedule stays
        at its beginning."""
        check_parts(state, 1)
        super().load_state_dict(state)
        self.steps = state["steps"]
        if state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._follow()

    def _follow(self) -> None:
        self.schedule.follow(whole_steps(self.steps))


def check_parts(state: State, optimizers: int) -> None:
    """Checks that a state is of so many optimizers.

    Raises:
        RefusedError: it is of another number.
    """
    if (count := len(state.get("parts", [state]))) != optimizers:
        raise RefusedError(f"the checkpoint's state is of {count} optimizers, this run has {optimizers}")
