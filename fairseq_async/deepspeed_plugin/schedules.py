"""Learning-rate schedules in DeepSpeed: its own by name, and those that follow a run's count."""

import warnings
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fairseq_async.algorithms.rule import State
from fairseq_async.deepspeed_plugin.compat import DeepSpeedOptimizer
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject
from fairseq_async.server.optimizers import learning_rates
from fairseq_async.server.optimizers.learning_rates import RateTable, StepSchedule, present_rates, tabulate
from fairseq_async.server.plan import whole_steps


@runtime_checkable
class DeepSpeedSchedule(Protocol):
    """A learning-rate schedule of DeepSpeed's: ``step(n)`` sets the rate of step n + 1."""

    last_batch_iteration: int

    def step(self, last_batch_iteration: int | None = None, /) -> None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> None: ...


Schedule: TypeAlias = DeepSpeedSchedule | LRScheduler


def is_deepspeeds(section: JsonObject | None) -> bool:
    """Whether a section ``"scheduler"`` names one of DeepSpeed's own schedules, which the server has too."""
    return section is not None and section.get("type") in lr_schedules.VALID_LR_SCHEDULES


def build(section: JsonObject, optimizer: torch.optim.Optimizer) -> DeepSpeedSchedule:
    """Builds one of DeepSpeed's schedules from the section ``"scheduler"``.

    Raises:
        ConfigurationError: DeepSpeed does not take its parameters.
    """
    params = section.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigurationError(f'"scheduler": "params" is {params!r}: it must be an object, as in {{"key": value}}')
    try:
        return cast(DeepSpeedSchedule, getattr(lr_schedules, str(section["type"]))(optimizer, **params))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"scheduler": "params": {error}') from error


def needs_table(schedule: Schedule | None) -> bool:
    """Whether a schedule can only take one step after the other, and not go to a count."""
    return schedule is not None and not isinstance(schedule, DeepSpeedSchedule | LambdaLR)


def check_schedule(schedule: Schedule | None) -> None:
    """Checks that a schedule is a function of a count: only such a schedule can follow the run.

    Raises:
        ConfigurationError: the schedule is of another kind.
    """
    if needs_table(schedule):
        name = type(schedule).__name__
        raise ConfigurationError(
            f"{name} cannot follow the scale-invariant steps of adascale: give one of DeepSpeed's schedules, or a "
            "LambdaLR, whose rates follow from any count"
        )


def set_schedule(schedule: Schedule | None, progress: float) -> None:
    """Sets a schedule to the run's progress: after n steps of a synchronous run, a schedule's count is n − 1."""
    if isinstance(schedule, DeepSpeedSchedule):
        if progress >= 1:
            schedule.step(int(progress) - 1)
    elif schedule is not None:
        schedule.last_epoch = int(progress) - 1
        with warnings.catch_warnings():  # torch takes the first rates for those after a step that did not come
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            schedule.step()


def steps_taken(schedule: Schedule | None) -> int:
    """Returns how many steps a schedule has taken; 0 for one that does not say so."""
    if isinstance(schedule, DeepSpeedSchedule):
        return schedule.last_batch_iteration + 1
    return learning_rates.steps_taken(schedule)


def show_rates(schedule: Schedule | None, optimizer: DeepSpeedOptimizer) -> None:
    """Lets a schedule of torch's, which a table stands for, answer ``get_last_lr`` with the rates that are there."""
    if schedule is not None and hasattr(schedule, "_last_lr"):
        schedule._last_lr = present_rates(optimizer)


class FollowedSchedule:
    """An engine's schedule, which follows the run from where it was when the run began, as after an ordinary run.

    One of torch's that takes one step after the other stays there: the optimizer has the rates of a table.

    Args:
        schedule: the engine's; None if it has none.
        optimizer: the engine's.
        total_steps: number of steps of the whole run, for the table; None where :meth:`follow` is never called.

    Attributes:
        begins_at: the schedule's steps before the run's first one.
        rates: the optimizer's learning rates at the run's first step.

    Raises:
        ConfigurationError: the rates do not follow from the number of steps alone.
    """

    def __init__(
        self, schedule: Schedule | None, optimizer: DeepSpeedOptimizer, total_steps: int | None = None
    ) -> None:
        self.schedule, self._optimizer, self._total_steps = schedule, optimizer, total_steps
        self.begin()

    def begin(self) -> None:
        """Lets the run begin from where the schedule and the rates are now."""
        self.begins_at = self._count = steps_taken(self.schedule)
        self.rates = present_rates(self._optimizer)
        self._make_table()

    def _make_table(self) -> None:
        self._table: RateTable | None = None
        if self._total_steps is not None and needs_table(self.schedule):
            # the one that ZeRO and fp16 wrap
            inner = cast(torch.optim.Optimizer, getattr(self._optimizer, "optimizer", self._optimizer))
            self._table = RateTable(inner, tabulate(self.schedule, inner, self._total_steps))

    def follow(self, progress: float) -> None:
        """Sets the schedule to the run's progress. The first step has the rates that are there, as in a plain loop."""
        steps = whole_steps(progress)
        if self._table is not None:
            self._table.follow(steps)
            show_rates(self.schedule, self._optimizer)
        elif steps:
            set_schedule(self.schedule, self.begins_at + steps)
        self.note()

    def state_dict(self) -> State:
        """Returns where the run began."""
        return {"begins_at": self.begins_at, "rates": self.rates}

    def load_state_dict(self, state: State) -> None:
        """Goes on from where a loaded run began, and gives the optimizer the rates of that time."""
        self.begins_at, self.rates = state["begins_at"], state["rates"]
        for group, rate in zip(self._optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        self._make_table()

    def note(self) -> None:
        """Notes where the schedule is now, for :meth:`check`."""
        self._count = steps_taken(self.schedule)

    def check(self) -> None:
        """Checks that nothing else has stepped the schedule.

        Raises:
            ConfigurationError: something has.
        """
        if (now := steps_taken(self.schedule)) != self._count:
            raise ConfigurationError(
                f"the script has moved the {type(self.schedule).__name__} of the engine from step {self._count} to "
                f"{now}: engine.step() steps it, by the run's progress; leave its step() out, and give it its position "
                "before the first batch"
            )


class NamedSchedule(StepSchedule):
    """The learning rates of one of DeepSpeed's schedules, for an optimizer that steps in the server."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: DeepSpeedSchedule) -> None:
        super().__init__(optimizer)
        self.scheduler = scheduler

    def follow(self, steps: int) -> None:
        set_schedule(self.scheduler, steps)

    def state_dict(self) -> State:
        """Returns the state of DeepSpeed's schedule."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.scheduler.load_state_dict(state)
