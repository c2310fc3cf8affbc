"""A scheduler's learning rates ahead of time, for an optimizer that steps in the server."""

import copy
import warnings
from collections import defaultdict

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from fairseq_async.errors import ConfigurationError

_MOST = 500_000  # rates; as JSON they must fit in one message of 16 MiB


def learning_rates(scheduler: LRScheduler, optimizer: Optimizer, steps: int) -> list[list[float]]:
    """The rates of the optimizer's groups after 0, 1, …, ``steps`` steps of the scheduler, which stays as it is.

    Raises:
        ConfigurationError: the scheduler is no function of its number of steps alone, or there are too many rates.
    """
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(f"scheduler is {scheduler!r}: it must be one of torch.optim.lr_scheduler")
    if not steps:
        raise ConfigurationError(f"{name}: its learning rates are sent to the server: say how many with total_steps=")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(f"{name} follows a loss that the server does not have: use another scheduler")
    if getattr(scheduler.optimizer, "optimizer", scheduler.optimizer) is not optimizer:  # accelerate wraps it
        raise ConfigurationError(f"{name} is the scheduler of another optimizer")
    if (steps + 1) * len(optimizer.param_groups) > _MOST:
        raise ConfigurationError(
            f"{name}: {steps} steps of {len(optimizer.param_groups)} parameter groups are more than {_MOST} learning "
            "rates, which is the most that is sent to the server"
        )
    if type(scheduler) is LambdaLR:  # a function of the number of steps, wherever it is now
        pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
        return [[float(base) * float(factor(step)) for base, factor in pairs] for step in range(steps + 1)]
    if getattr(scheduler, "last_epoch", 0) != 0:
        raise ConfigurationError(
            f"{name} has taken {scheduler.last_epoch} steps: give a new one; the server's state has the position"
        )
    return _step_through(scheduler, optimizer, steps)


def _step_through(scheduler: LRScheduler, optimizer: Optimizer, steps: int) -> list[list[float]]:
    """Steps a copy; parameters and their state are not copied."""
    shared: dict[int, object] = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    shared[id(optimizer.state)] = defaultdict(dict)
    copied = copy.deepcopy(scheduler, shared)
    groups, before = copied.optimizer.param_groups, _others(copied)
    rates = [[float(group["lr"]) for group in groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the copy's optimizer takes no steps
        for _ in range(steps):
            copied.step()
            rates.append([float(group["lr"]) for group in groups])
            if _others(copied) != before:
                raise ConfigurationError(
                    f"{type(scheduler).__name__} changes more than the learning rate: give it cycle_momentum=False"
                )
    return rates


def _others(scheduler: LRScheduler) -> list[tuple[object, object]]:
    return [(group.get("momentum"), group.get("betas")) for group in scheduler.optimizer.param_groups]
