"""Learning-rate schedules in DeepSpeed: its own by name, and those that follow a run's count."""

from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject
from fairseq_async.server.optimizers.learning_rates import StepSchedule


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


def check_schedule(schedule: Schedule | None) -> None:
    """Checks that a schedule is a function of a count: only such a schedule can follow the run.

    Raises:
        ConfigurationError: the schedule is of another kind.
    """
    if schedule is not None and not isinstance(schedule, DeepSpeedSchedule | LambdaLR):
        name = type(schedule).__name__
        raise ConfigurationError(f"{name} cannot follow the run's progress; use one of DeepSpeed's, or LambdaLR")


def set_schedule(schedule: Schedule | None, progress: float) -> None:
    """Sets a schedule to the run's progress: after n steps of a synchronous run, a schedule's count is n − 1."""
    if isinstance(schedule, DeepSpeedSchedule):
        if progress >= 1:
            schedule.step(int(progress) - 1)
    elif schedule is not None:
        schedule.last_epoch = int(progress) - 1
        schedule.step()


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
