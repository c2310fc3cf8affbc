"""A gradient rule whose optimizer follows a learning-rate schedule."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from fairseq_async.algorithms import HybridAccumulation, Rule, Update
from fairseq_async.algorithms.rule import CompoundRule, State
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


def accumulation(
    options: HybridOptions,
    workers: int,
    optimizer: Optimizer,
    clip_norm: float,
    tensors: Sequence[Tensor] | None = None,
    elementwise: bool = False,
) -> HybridAccumulation:
    """Builds the rule of a run of hybrid asynchronous SGD.

    Args:
        workers: number of workers that were announced.
        optimizer: the inner optimizer, over the server's flat parameters; the rest is as in
            :class:`~fairseq_async.algorithms.HybridAccumulation`.
    """
    updates, partial = options.updates_per_step or workers, options.closes_early
    return HybridAccumulation(optimizer, updates, clip_norm, tensors, partial_steps=partial, elementwise=elementwise)


class ScheduledRule(CompoundRule):
    """Counts the steps of a rule's optimizer, and lets a schedule set its learning rate for the next one.

    Attributes:
        steps: number of the optimizer's steps so far; a partial step counts as its part.
    """

    def __init__(self, rule: Rule, schedule: Schedule) -> None:
        self.rule, self.rules, self.schedule, self.steps = rule, (rule,), schedule, 0.0
        schedule.follow(0)

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

    def apply(self, parameters: Tensor, update: Update) -> float:
        return self.count(self.rule.apply(parameters, update))

    def count(self, share: float) -> float:
        """Counts this share of a step, which was taken; returns it."""
        if share:
            self.steps += share
            self._follow()
        return share

    def moves_parameters(self, ahead: int = 0) -> bool:
        return self.rule.moves_parameters(ahead)

    def dispatch(self, parameters: Tensor) -> Tensor:
        return self.rule.dispatch(parameters)

    @property
    def momentum_buffer(self) -> Tensor | None:
        return self.rule.momentum_buffer

    def state_dict(self) -> State:
        return self.rule.state_dict() | {"steps": self.steps, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a state. With None for the schedule in it, as after ``--reset-lr-scheduler``, the schedule stays
        at its beginning."""
        check_parts(state, 1)
        self.rule.load_state_dict(state)
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
