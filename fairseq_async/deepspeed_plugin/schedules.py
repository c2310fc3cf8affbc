"""Learning-rate schedules in DeepSpeed: those that follow a run's count, and those that are drawn up as a table."""

import copy
import warnings
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject

LARGEST_TABLE = 400_000  # rates: as JSON half of what a worker's first message may have
Rates: TypeAlias = list[list[float]]


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
    """One of DeepSpeed's schedules, from the section ``"scheduler"``.

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
    """Checks that a schedule is a function of a count, which alone can follow the run.

    Raises:
        ConfigurationError: it is another.
    """
    if schedule is not None and not isinstance(schedule, DeepSpeedSchedule | LambdaLR):
        name = type(schedule).__name__
        raise ConfigurationError(f"{name} cannot follow the run's progress; use one of DeepSpeed's, or LambdaLR")


def set_schedule(schedule: Schedule | None, progress: float) -> None:
    """Sets a schedule to where the run is: after n steps of a synchronous run its count is n − 1."""
    if isinstance(schedule, DeepSpeedSchedule):
        if progress >= 1:
            schedule.step(int(progress) - 1)
    elif schedule is not None:
        schedule.last_epoch = int(progress) - 1
        schedule.step()


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates, steps: int) -> None:
    """Sets each group's rate from row ``steps`` of a table, or from its last row."""
    for group, rate in zip(optimizer.param_groups, rates[min(steps, len(rates) - 1)], strict=True):
        group["lr"] = rate


def tabulate(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> Rates:
    """The rates of a script's own schedule, which a server cannot have: it is Python code, and nothing is unpickled.

    A copy of the schedule is stepped as DeepSpeed would step it, once after each step of the optimizer.

    Args:
        schedule: bound to ``optimizer``; neither is changed.
        steps: of the whole run.

    Returns:
        In row n the rate of each parameter group after n steps.

    Raises:
        ConfigurationError: the rates do not follow from the number of steps, or would be too many.
    """
    name = type(schedule).__name__
    if steps == 0:
        raise ConfigurationError(
            f'{name}: the server needs its rates, one for each step, so say with "total_steps" in "async_training" how '
            'many there are, or use a section "scheduler" with one of DeepSpeed\'s'
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigurationError(f"{name} follows a loss, not the number of steps: use another lr_scheduler")
    if (steps + 1) * len(optimizer.param_groups) > LARGEST_TABLE:
        raise ConfigurationError(
            f"{name}: {steps} steps are too many for a table of its rates ({LARGEST_TABLE} rates of all parameter "
            'groups); use a section "scheduler" with one of DeepSpeed\'s'
        )
    schedule, optimizer = _copied(schedule, optimizer)
    others = _other_options(optimizer)
    rates = [[float(group["lr"]) for group in optimizer.param_groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        for step in range(steps):
            _step(schedule, name, step, steps)
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            if _other_options(optimizer) != others:
                raise ConfigurationError(
                    f"{name} changes more than learning rates, which alone the server follows: switch that off "
                    "(cycle_momentum=False), or use another lr_scheduler"
                )
    return rates


def _copied(schedule: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
    """A schedule and the optimizer that it sets; the parameters are those of before."""
    shared = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    try:
        return copy.deepcopy((schedule, optimizer), shared)
    except Exception as error:  # it is the script's code
        name = type(schedule).__name__
        raise ConfigurationError(f"{name} cannot be copied to find its rates ({error}); use another") from error


def _step(schedule: Any, name: str, step: int, steps: int) -> None:
    try:
        schedule.step()
    except Exception as error:  # it is the script's code
        said = " ".join(str(error).split())
        raise ConfigurationError(
            f'{name} cannot take step {step + 1} of "total_steps" {steps} ({type(error).__name__}: {said})'
        ) from error


def _other_options(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    own = {"params", "lr", "initial_lr"}
    return [{name: value for name, value in group.items() if name not in own} for group in optimizer.param_groups]
