"""Learning rates as functions of the steps of the server's optimizer; a script's own schedule becomes a table."""

import copy
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, option

LARGEST_TABLE = 400_000  # rates; as JSON they are half of the largest message of a worker
Rates: TypeAlias = list[list[float]]  # row n: the rate of each parameter group after n steps


class StepSchedule:
    """A schedule for :class:`~fairseq_async.server.optimizers.scheduled_rule.ScheduledRule`: learning rates that depend
    on the optimizer's steps alone. In this class they are constant."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def learning_rate(self) -> float:
        """The first group's rate for the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, steps: int) -> None:
        """Sets the rates for the step after so many steps; here they stay as they are."""

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: the rates depend on steps."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: the rates depend on steps."""

    def state_dict(self) -> State:
        """Returns an empty state: the rates follow from the number of steps."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Does nothing; see :meth:`state_dict`."""


class RateTable(StepSchedule):
    """Learning rates from a table; after its end the last row stays.

    Args:
        rates: see :func:`tabulate`; empty where they are constant.

    Raises:
        ConfigurationError: a row does not have one rate for each group.
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


def tabulate(scheduler: Any, optimizer: Optimizer, steps: int, counted: bool = False) -> Rates:
    """Tabulates the rates of a script's own scheduler. A server cannot have that: it is Python code, and nothing is
    unpickled.

    Args:
        scheduler: a scheduler of ``optimizer``, whose method ``step`` is called once after each step of the optimizer;
            neither is changed.
        steps: number of steps of the whole run.
        counted: whether the server's own count, in a state that it is given, has the steps that the scheduler has
            taken; row 0 is then that of a new scheduler.

    Returns:
        A table: row n has the rate of each parameter group after n steps from where the scheduler is now. The first row
        has the optimizer's present rates, as the first step of a plain loop does, unless ``counted``.

    Raises:
        ConfigurationError: the rates do not follow from the number of steps alone, or are too many.
    """
    name = type(scheduler).__name__
    _check(scheduler, name, optimizer, steps)
    taken = steps_taken(scheduler)
    if type(scheduler) is LambdaLR:
        row_after = _row_of_lambdas(scheduler, 0 if counted else taken)
    elif counted and taken:
        raise ConfigurationError(f"{name} has taken {taken} steps: give a new one; the server's state has the position")
    else:
        row_after = _row_of_copy(scheduler, name, optimizer)
    rates = []
    for step in range(steps + 1):
        try:
            rates.append(row_after(step))
        except ConfigurationError:
            raise
        except Exception as error:  # the scheduler is the script's code
            said = " ".join(str(error).split())
            raise ConfigurationError(
                f"{name} cannot take step {step} of {option('total_steps')} {steps} ({type(error).__name__}: {said})"
            ) from error
        if not all(map(math.isfinite, rates[-1])):
            raise ConfigurationError(
                f"{name} gives the learning rates {rates[-1]} after {step} steps: make them finite"
            )
    return rates if counted else [present_rates(optimizer), *rates[1:]]


def rates_by_step(scheduler: Any, optimizer: Optimizer, steps: int, begins_at: int) -> Callable[[int], list[float]]:
    """Returns a function from a number of steps, in any order, to the rates of the parameter groups after them; see
    :func:`tabulate`, which a ``LambdaLR`` does not need. The scheduler had taken ``begins_at`` steps when the run
    began."""
    if type(scheduler) is LambdaLR:
        return _row_of_lambdas(scheduler, begins_at)
    rates = tabulate(scheduler, optimizer, steps, counted=not begins_at)
    return lambda step: rates[min(step, steps)]


def begin_anew(scheduler: Any) -> None:
    """Gives a scheduler that has taken no step, and its optimizer, the rates that it began with: the optimizer may have
    been loaded with later ones, from a checkpoint of a run that has the position."""
    for group in scheduler.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["initial_lr"])
        else:
            group["lr"] = group["initial_lr"]
    _begin(scheduler)


def _begin(scheduler: Any) -> None:
    """Sets the first rates as a scheduler does when it is made; a chained one multiplies those of the one before."""
    within = getattr(scheduler, "_schedulers", [])
    if isinstance(scheduler, SequentialLR):
        within = within[bisect_right(scheduler._milestones, 0) :][:1]
    for each in within:
        _begin(each)
    if not within and hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch = -1
        scheduler._initial_step()
    scheduler._last_lr = present_rates(scheduler.optimizer)


class StepCount:
    """Watches how a worker's loop steps its own scheduler, whose rates the server takes, by steps of the optimizer.

    A fast worker steps it more often than the run has steps, where OneCycleLR, for one, would fail: it is kept from
    counting beyond them.

    Args:
        scheduler: one of torch's, of which :func:`tabulate` has made a table.
        steps: number of steps of the whole run.

    Attributes:
        early: whether this is the first step of the optimizer, and the loop has stepped the scheduler before it.
        ended: whether the scheduler has come to the run's end, and may have been taken back.
    """

    def __init__(self, scheduler: Any, steps: int) -> None:
        self._scheduler, self._counting = scheduler, _counting(scheduler)
        self._began = self._last = steps_taken(scheduler)
        self._end = self._began + steps
        self._kept = [each.last_epoch for each in self._counting]
        self.ended, self.early = False, False
        self._before_first = True
        self._rates: list[float] = []  # before the last step of the optimizer
        self._idle = self._hasty = 0  # how many steps of the optimizer in a row came without one of it, or with more

    def before_step(self) -> None:
        """Takes back the last step of a scheduler that has come to the run's end; to be called before each step of the
        optimizer.

        Raises:
            ConfigurationError: the loop steps the scheduler less often, or more often, than the optimizer, or by parts
                of an epoch. A loop that never steps it is right: the server's schedule goes on by itself.
        """
        taken = steps_taken(self._scheduler)
        self.ended |= taken >= self._end
        self.early, self._before_first = self._before_first and taken > self._began, False
        if self._counting and taken < self._end:
            self._check(taken)
            self._kept = [each.last_epoch for each in self._counting]
        for each, kept in zip(self._counting, self._kept, strict=True):
            each.last_epoch = kept

    def _check(self, taken: int) -> None:
        more, self._last = taken - self._last, taken
        before, self._rates = self._rates, [float(rate) for rate in self._scheduler.get_last_lr()]
        if before and not more and self._rates != before:
            raise ConfigurationError(
                f"{type(self._scheduler).__name__} is stepped by parts of an epoch, as in step(epoch + i / n), and the "
                "server takes its rates at each step of the optimizer: call step() without an argument, and give its "
                "lengths in steps (for an epoch of n batches, n steps)"
            )
        self._hasty = self._hasty + 1 if more > 1 else 0  # a GradScaler skips steps of the optimizer, but not for ever
        late, self._idle = self._idle, 0 if more else self._idle + 1
        sparse = late > 1 if more else self._idle > 1 and taken > self._began
        if self._hasty > 2 or sparse:
            often = "more often" if self._hasty > 2 else "less often"
            raise ConfigurationError(
                f"{type(self._scheduler).__name__} is stepped {often} than the optimizer, and the server takes its "
                "rates at each step of the optimizer: step it once after each optimizer.step(), and give its lengths "
                "in steps (for an epoch of n batches, n steps)"
            )


def _counting(scheduler: Any) -> list[Any]:
    """Returns what counts steps in a scheduler: itself, and those within it. torch's ChainedScheduler does not count,
    but those that it chains do."""
    within = [each for inner in getattr(scheduler, "_schedulers", []) for each in _counting(inner)]
    return [scheduler, *within] if hasattr(scheduler, "last_epoch") else within


def steps_taken(scheduler: Any) -> int:
    """Returns how many steps a scheduler has taken; 0 where it does not count."""
    counting = _counting(scheduler)
    return int(counting[0].last_epoch) if counting else 0


def present_rates(optimizer: Optimizer) -> list[float]:
    """Returns the learning rate of each parameter group; 0 where it has none."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def present_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each parameter group but the learning rate, such as the weight decay, and the ``id`` of
    each of its parameters."""
    names = [name for name in optimizer.defaults if name != "lr"]
    return [
        {name: group[name] for name in names if name in group} | {"params": {id(each) for each in group["params"]}}
        for group in optimizer.param_groups
    ]


def check_options(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Checks, on a worker, that nothing changes options of the optimizer that the server would not take.

    Args:
        optimizer: the worker's own, which does not step.
        before: what :func:`present_options` has returned when the server was told of them.

    Raises:
        ConfigurationError: something has changed one.
    """
    if (now := present_options(optimizer)) == before:
        return
    for number, (present, given) in enumerate(zip(now, before, strict=False)):
        for name in given:
            if present.get(name) != given[name] and name == "params":
                raise ConfigurationError(
                    f"param_groups[{number}] of the optimizer has other parameters than at the beginning, but it steps "
                    "in the server, which keeps those: leave them as they were, or use local SGD"
                )
            if present.get(name) != given[name]:
                raise ConfigurationError(
                    f'param_groups[{number}]["{name}"] of the optimizer was {given[name]} and is {present.get(name)} '
                    f"now, but it steps in the server, which keeps {given[name]}: leave it as it was"
                )
    raise ConfigurationError(
        "the optimizer has more parameter groups than at the beginning, and it steps in the server"
    )


def check_rates(optimizer: Optimizer, before: list[float], remedy: str) -> None:
    """Checks, on a worker, that no scheduler and no script sets learning rates that the server would not take.

    Args:
        optimizer: the worker's own, which does not step.
        before: the rates that the server has.
        remedy: says how the user gives the server a schedule.

    Raises:
        ConfigurationError: something sets them.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # every scheduler of torch leaves this mark
        raise ConfigurationError(f"the optimizer has a scheduler, but it steps in the server: {remedy}")
    check_unset_rates(optimizer, before, remedy)


def check_unset_rates(optimizer: Optimizer, before: list[float], remedy: str) -> None:
    """Checks as :func:`check_rates`, where the optimizer may have a scheduler, whose rates the server has."""
    for number, (rate, given) in enumerate(zip(present_rates(optimizer), before, strict=True)):
        if rate != given:
            raise ConfigurationError(
                f'param_groups[{number}]["lr"] of the optimizer was {given:g} and is {rate:g} now, but it steps in the '
                f"server: {remedy}"
            )


def check_table(scheduler: Any, began: int, rates: Rates) -> None:
    """Checks, on a worker, that a scheduler still has the rates of the table that was made of it.

    A ``LambdaLR`` is asked for the last ones; of another scheduler, which the loop may step, those that it has set are
    compared.

    Args:
        began: the scheduler's steps before the first row.

    Raises:
        ConfigurationError: it has others, which follow from something else than the number of its steps.
    """
    name, taken = type(scheduler).__name__, steps_taken(scheduler) - began
    if type(scheduler) is LambdaLR:
        taken = len(rates) - 1
        present = _row_of_lambdas(scheduler, began)(taken)
    elif 0 < taken < len(rates):
        present = [float(rate) for rate in scheduler.get_last_lr()]
    else:
        return
    if present != rates[taken]:
        raise ConfigurationError(
            f"{name} gives the learning rates {present} after {taken} steps, and gave {rates[taken]} when the run "
            "began: use a scheduler whose rates depend on the number of its steps alone"
        )


def check_scheduled(optimizer: Optimizer, scheduler: Any) -> None:
    """Checks, on a worker, that the learning rates are those of its scheduler, by which the server sets its own.

    Raises:
        ConfigurationError: something else has set them.
    """
    for number, (rate, wanted) in enumerate(zip(present_rates(optimizer), scheduler.get_last_lr(), strict=True)):
        if rate != float(wanted):
            raise ConfigurationError(
                f'param_groups[{number}]["lr"] of the optimizer is {rate:g}, and the scheduler has set '
                f"{float(wanted):g}; it steps in the server, at the scheduler's rates: leave it as it was"
            )


def _check(scheduler: Any, name: str, optimizer: Optimizer, steps: int) -> None:
    if not steps:
        raise ConfigurationError(
            f"{name}: its learning rates become a table of the run's steps: say how many there are with "
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
            f"{name}: {steps} steps of {groups} parameter groups are more than {LARGEST_TABLE} learning rates, the "
            "most that a table may have"
        )


def _row_of_lambdas(scheduler: LambdaLR, taken: int) -> Callable[[int], list[float]]:
    """Returns a function from a number of steps, besides those taken, to the rates after them."""
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    return lambda step: [float(base) * float(factor(taken + step)) for base, factor in pairs]


def _row_of_copy(scheduler: Any, name: str, optimizer: Optimizer) -> Callable[[int], list[float]]:
    """Returns a function from a number of steps to the rates after them, by a copy of the scheduler. Call it once for
    each number, in the order 0, 1, …."""
    # In the copy a bare optimizer replaces the real one: only its groups change; no state and no parameter is copied.
    groups = [{key: _own(value) for key, value in group.items()} for group in optimizer.param_groups]
    stand_in = Optimizer(groups, dict(optimizer.defaults))
    replaced = {id(each): stand_in for each in (optimizer, getattr(scheduler, "optimizer", optimizer))}
    try:
        copied = copy.deepcopy(scheduler, replaced)
    except Exception as error:  # the scheduler is the script's code
        raise ConfigurationError(f"{name} cannot be copied to find its rates ({error}); use another") from error
    others = _other_options(stand_in)

    def row_after(step: int) -> list[float]:
        if step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the copy's optimizer takes no steps
                copied.step()
        if _other_options(stand_in) != others:
            raise ConfigurationError(f"{name} changes more than the learning rate: give it cycle_momentum=False")
        return [float(group["lr"]) for group in stand_in.param_groups]

    return row_after


def _own(value: object) -> object:
    """Returns a copy of a tensor, as schedulers change a learning rate that is one in place; else the value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _other_options(optimizer: Optimizer) -> list[dict[str, object]]:
    rates = {"params", "lr", "initial_lr"}
    return [{name: value for name, value in group.items() if name not in rates} for group in optimizer.param_groups]
