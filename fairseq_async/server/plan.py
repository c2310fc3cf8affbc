"""The plan of a run: the next work of each worker, and the end of the run."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from fairseq_async.algorithms.rule import Rule, State
from fairseq_async.errors import RefusedError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Assignment, Report, ScheduleEvent
from fairseq_async.protocol.layout import Layout

_PASSES = 100  # passes over the data in one step, at most: micro-batches may be accumulated over a small set
_ROUNDING = 1e-6  # error of a sum of parts of passes over the data, or of steps


def whole_steps(steps: float) -> int:
    """Returns how many steps are complete in a sum of parts of steps, which has rounding errors."""
    return int(steps + _ROUNDING)


class Plan(Protocol):
    """A method's plan of the run, beside its rule: learning rate, local steps, data and end."""

    @property
    def finished(self) -> bool: ...

    def assign(self, worker: int) -> Assignment:
        """Returns the worker's next work; an idle assignment if there is none."""
        ...

    def expected_seconds(self, worker: int) -> float | None:
        """Returns how long the worker's present work takes at its speed so far; None where that is not known."""
        ...

    def check(self, report: Report) -> None:
        """Raises a RefusedError for a report that no worker of this method can have sent."""
        ...

    def record(self, worker: int, report: Report) -> None:
        """Counts the work of an update that was settled."""
        ...

    def release(self, worker: int) -> None:
        """Gives up the work of a worker that is gone: others may do it."""
        ...

    def follow(self, event: ScheduleEvent) -> float:
        """Follows the begin or end of an epoch of worker 0; returns the learning rate."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


Build: TypeAlias = Callable[[MethodSpec, Layout, Tensor], tuple[Rule, Plan]]
"""Builds rule and plan from a method, the layout and the flat parameters, which the rule changes in place."""


class EpochSchedule(Protocol):
    """A learning rate that may change at the ends of epochs."""

    @property
    def steps(self) -> float:
        """Number of the optimizer's steps so far; a partial step counts as its part."""
        ...

    @property
    def learning_rate(self) -> float: ...

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


class EpochPlan:
    """The plan of gradient methods: a schedule beside the optimizer, and an end after so many steps or passes over the
    data.

    Args:
        max_epoch: the run ends after so many passes of all workers together; 0 for no end.
        total_steps: the run ends after so many steps, to which parts of steps add up; 0 for no end.
    """

    def __init__(self, schedule: EpochSchedule, max_epoch: int, total_steps: int = 0) -> None:
        self.schedule, self.max_epoch, self.total_steps = schedule, max_epoch, total_steps
        self.epochs = 0.0

    @property
    def finished(self) -> bool:
        if self.max_epoch and self.epochs > self.max_epoch - _ROUNDING:
            return True
        return self.total_steps > 0 and whole_steps(self.schedule.steps) >= self.total_steps

    def assign(self, worker: int) -> Assignment:
        """Returns the learning rate, which the worker logs, and the steps so far."""
        return Assignment(learning_rate=self.schedule.learning_rate, total_progress=self.schedule.steps)

    def expected_seconds(self, worker: int) -> float | None:
        return None

    def check(self, report: Report) -> None:
        """Checks the report of a gradient.

        Raises:
            RefusedError: it is of more data than one gradient can be of.
        """
        check_epochs(report.epochs, 1)

    def record(self, worker: int, report: Report) -> None:
        self.epochs += report.epochs

    def release(self, worker: int) -> None:
        """Does nothing: no work is reserved for a worker."""

    def follow(self, event: ScheduleEvent) -> float:
        if event.event == "begin_epoch":
            self.schedule.begin_epoch(event.epoch)
        else:
            self.schedule.end_epoch(event.epoch, event.loss)
        return self.schedule.learning_rate

    def state_dict(self) -> State:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: State) -> None:
        self.epochs = state["epochs"]


def check_epochs(epochs: float, steps: int) -> None:
    """Checks the passes over the data of so many steps.

    Raises:
        RefusedError: there are more passes than so many steps can take.
    """
    if epochs > _PASSES * max(1, steps):
        raise RefusedError(f"epochs {epochs:g}: a step is of {_PASSES} passes over the data at most")


def no_schedule(event: ScheduleEvent) -> float:
    """Raises a RefusedError, for a method whose server has no learning-rate schedule."""
    raise RefusedError(f"{event.event}: this method has no learning-rate schedule in the server")
