"""Learning rates by the steps of an optimizer in the server; a script's own schedule as a table of them."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, option

LARGEST_TABLE = 400_000  # rates: as JSON half of what a worker's first message may have
Rates: TypeAlias = list[list[float]]  # of each parameter group, after 0, 1, … steps


class StepSchedule:
    """The learning rates of an optimizer as a function of its steps, here constant; a schedule of
    :class:`~fairseq_async.server.optimizers.scheduled_rule.ScheduledRule`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def learning_rate(self) -> float:
        """The first group's rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, steps: int) -> None:
        """Sets the rates of the step after so many steps."""

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: the rates are of steps."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: the rates are of steps."""

    def state_dict(self) -> State:
        """Nothing: the number of steps says all."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """See :meth:`state_dict`."""


class RateTable(StepSchedule):
    """Learning rates from a table, whose last ones stay.

    Args:
        rates: see :func:`tabulate`; empty where they are constant.

    Raises:
        ConfigurationError: a row has not one rate for each group.
    """

    def __init__(self, optimizer: Optimizer, rates: Rates) -> None:
        super().__init__(optimizer)
        groups = len(optimizer.param_groups)
        if any(len(row) != groups for row in rates):
            raise ConfigurationError(f"the learning rates are not those of {groups} parameter groups")
        self.rates = rates

    def follow(self, steps: int) -> None:
        if self.rates:
            row = self.rates[min(steps, len(self.rates) - 1)]
            for group, rate in zip(self.optimizer.param_groups, row, strict=True):
                group["lr"] = rate


def tabulate(scheduler: Any, optimizer: Optimizer, steps: int) -> Rates:
    """The rates of a script's own scheduler, which a server cannot have: it is Python code, and nothing is unpickled.

    Args:
        scheduler: of ``optimizer``, with a method ``step`` that is called once after each of its steps; neither is
            changed.
        steps: of the whole run.

    Returns:
        In row n the rate of each parameter group after n steps.

    Raises:
        ConfigurationError: the rates do not follow from the number of steps alone, or are too many.
    """
    name = type(scheduler).__name__
    _check(scheduler, name, optimizer, steps)
    row_after = _row_of_lambdas(scheduler) if type(scheduler) is LambdaLR else _row_of_copy(scheduler, name, optimizer)
    rates = []
    for step in range(steps + 1):
        try:
            rates.append(row_after(step))
        except ConfigurationError:
            raise
        except Exception as error:  # it is the script's code
            said = " ".join(str(error).split())
            raise ConfigurationError(
                f"{name} cannot take step {step} of {option('total_steps')} {steps} ({type(error).__name__}: {said})"
            ) from error
        if not all(map(math.isfinite, rates[-1])):
            raise ConfigurationError(
                f"{name} gives the learning rates {rates[-1]} after {step} steps: make them finite"
            )
    return rates


def _check(scheduler: Any, name: str, optimizer: Optimizer, steps: int) -> None:
    if not steps:
        raise ConfigurationError(
            f"{name}: its learning rates are sent to the server: say how many steps there are with "
            f"{option('total_steps')}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(f"{name} follows a loss that the server does not have: use another scheduler")
    given = getattr(scheduler, "optimizer", optimizer)
    if getattr(given, "optimizer", given) is not optimizer:  # accelerate wraps it
        raise ConfigurationError(f"{name} is the scheduler of another optimizer")
    groups = len(optimizer.param_groups)
    if (steps + 1) * groups > LARGEST_TABLE:
        raise ConfigurationError(
            f"{name}: {steps} steps of {groups} parameter groups are more than {LARGEST_TABLE} learning rates, which "
            "is the most that is sent to the server"
        )
    taken = getattr(scheduler, "last_epoch", 0)
    if taken != 0 and type(scheduler) is not LambdaLR:
        raise ConfigurationError(f"{name} has taken {taken} steps: give a new one; the server's state has the position")


def _row_of_lambdas(scheduler: LambdaLR) -> Callable[[int], list[float]]:
    """The rates after so many steps: a function of their number, wherever the scheduler is now."""
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    return lambda step: [float(base) * float(factor(step)) for base, factor in pairs]


def _row_of_copy(scheduler: Any, name: str, optimizer: Optimizer) -> Callable[[int], list[float]]:
    """The rates after 0 steps of a copy, then after 1, and so on; called once for each, in this order."""
    # In the copy a bare optimizer stands for the own one: its groups change, no state and no parameter is copied.
    groups = [{key: _own(value) for key, value in group.items()} for group in optimizer.param_groups]
    stand_in = Optimizer(groups, dict(optimizer.defaults))
    replaced = {id(each): stand_in for each in (optimizer, getattr(scheduler, "optimizer", optimizer))}
    try:
        copied = copy.deepcopy(scheduler, replaced)
    except Exception as error:  # it is the script's code
        raise ConfigurationError(f"{name} cannot be copied to find its rates ({error}); use another") from error
    others = _other_options(stand_in)

    def row_after(step: int) -> list[float]:
        if step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the copy's optimizer takes no steps
                copied.step()
        if _other_options(stand_in) != others:
            raise ConfigurationError(f"{name} changes more than the learning rate: give it cycle_momentum=False")
        return [float(group["lr"]) for group in stand_in.param_groups]

    return row_after


def _own(value: object) -> object:
    """A learning rate may be a tensor, which schedulers change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _other_options(optimizer: Optimizer) -> list[dict[str, object]]:
    rates = {"params", "lr", "initial_lr"}
    return [{name: value for name, value in group.items() if name not in rates} for group in optimizer.param_groups]
