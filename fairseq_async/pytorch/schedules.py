"""Schedules of a worker's own optimizer: one that follows the progress of the run, and a watch for any other."""

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.training import listed
from fairseq_async.server.optimizers.learning_rates import (
    RateTable,
    begin_anew,
    check_table,
    present_rates,
    steps_taken,
    tabulate,
)
from fairseq_async.server.plan import whole_steps
from fairseq_async.worker.start.server_process import say

Given = LRScheduler | Sequence[LRScheduler | None] | None


def one_for_each(optimizers: Sequence[Optimizer], given: Given) -> list[LRScheduler | None]:
    """Returns the scheduler of each optimizer; None where it has none.

    Raises:
        ConfigurationError: there are more or fewer than optimizers, or one is no scheduler.
    """
    schedulers = [None] * len(optimizers) if given is None else listed(given)
    if len(schedulers) != len(optimizers):
        raise ConfigurationError(
            f"scheduler has {len(schedulers)} for {len(optimizers)} optimizers: give a list, with None for one without "
            "a scheduler"
        )
    for each in schedulers:
        if not (each is None or isinstance(each, LRScheduler)):
            wraps = ", which wraps another: give that one, scheduler.scheduler" if hasattr(each, "scheduler") else ""
            needed = wraps or ": it must be one of torch.optim.lr_scheduler"
            raise ConfigurationError(f"scheduler is a {type(each).__name__}{needed}")
    return schedulers


class ProgressSchedule:
    """Sets the learning rates of a worker's own optimizer by the progress of the run, and not by its own steps: a fast
    worker would come to the end of its schedule long before the others, and a slow one never.

    Args:
        scheduler: one of torch's, of the optimizer, whose rates are a function of the number of its steps; nobody is to
            step it.
        total_steps: number of steps of the whole run, in mean local steps of a worker.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler, total_steps: int) -> None:
        self._optimizer, self._scheduler, self._total_steps = optimizer, scheduler, total_steps
        self._table = RateTable(optimizer, tabulate(scheduler, optimizer, total_steps))
        self._taken = steps_taken(scheduler)
        self._rates = present_rates(optimizer)

    def join(self, progress: float) -> None:
        """Takes the progress of a run that is under way: the optimizer's present rates may be those of a checkpoint,
        and not the first ones of its new scheduler."""
        if whole_steps(progress) and not self._taken:
            begin_anew(self._scheduler)
            self._table.rates = tabulate(self._scheduler, self._optimizer, self._total_steps)
            self._rates = present_rates(self._optimizer)

    def follow(self, progress: float) -> None:
        """Sets the rates for the step after this progress.

        Raises:
            ConfigurationError: something else has set them, or has stepped the scheduler.
        """
        self.check()
        self._table.follow(whole_steps(progress))
        self._rates = present_rates(self._optimizer)

    def check(self) -> None:
        """Checks that nothing else has set the rates, and that they are still those of the scheduler; see
        :meth:`follow`."""
        if steps_taken(self._scheduler) != self._taken or present_rates(self._optimizer) != self._rates:
            raise ConfigurationError(
                f"scheduler= ({type(self._scheduler).__name__}) follows the progress of the run, and something else "
                "sets the learning rate too: leave scheduler.step() out of the loop, and give the scheduler's "
                "lengths in steps, not in epochs"
            )
        check_table(self._scheduler, self._taken, self._table.rates)


class OwnRates:
    """Watches the rates of an optimizer that steps on its worker and has no schedule which follows the run.

    A loop may set them by the run's progress, as it is told; a schedule of a worker's own steps is a mistake: a fast
    worker takes more than the run has, and a slow one fewer. So is one of a metric, which each worker has of its own.

    Args:
        remedy: says how the user gives a schedule that follows the run.

    Attributes:
        asked: whether the loop has read the run's progress since the last check.
    """

    def __init__(self, optimizer: Optimizer, remedy: str) -> None:
        self._optimizer, self._remedy = optimizer, remedy
        self._warned = False
        self._before: tuple[float, list[float]] | None = None
        self.asked = False

    def check(self, progress: float) -> None:
        """Checks, before a step, that no scheduler counts the worker's steps, and that the rates are those of the step
        before where the progress is, or where the loop has not asked for it. The first other ones are named in a
        warning, as the loop may have asked for its log.

        Raises:
            ConfigurationError: it does, or they are not.
        """
        rates, before = present_rates(self._optimizer), self._before
        by_progress = self.asked and before is not None and progress != before[0]
        changed = before is not None and rates != before[1]
        if (changed and not by_progress) or hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigurationError(
                f"a scheduler, or the loop, sets the learning rate of {type(self._optimizer).__name__} by this "
                "worker's own steps or metric, but a fast worker takes more steps than the run has, and a slow one "
                f"fewer: {self._remedy}"
            )
        if changed and not self._warned:
            self._warned = True
            say(
                f"warning: the loop changes the learning rate of {type(self._optimizer).__name__}, which is right if "
                "the rate follows from the run's progress alone: one of this worker's own steps or metric differs "
                f"from the other workers'; then {self._remedy}"
            )
        self._before, self.asked = (progress, rates), False
