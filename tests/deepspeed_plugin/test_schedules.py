"""A script's own learning-rate schedule as a table of rates, and the server that follows it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fairseq_async.deepspeed_plugin import schedules
from fairseq_async.deepspeed_plugin.server import StepSchedule
from fairseq_async.errors import ConfigurationError

STEPS = 6
Make = Callable[[SGD], Any]


def optimizer() -> SGD:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return SGD([{"params": [one]}, {"params": [other], "lr": 0.5}], lr=1.0, momentum=0.9)


def sequential(of: SGD) -> SequentialLR:
    return SequentialLR(of, [ConstantLR(of, 0.1, total_iters=2), ExponentialLR(of, 0.5)], milestones=[2])


@pytest.mark.parametrize(
    "make",
    [
        partial(LambdaLR, lr_lambda=[lambda step: 0.5**step, lambda step: step / 10]),
        partial(CosineAnnealingLR, T_max=4),
        partial(OneCycleLR, max_lr=2.0, total_steps=STEPS, cycle_momentum=False),
        sequential,
        partial(WarmupLR, warmup_num_steps=4),
    ],
)
def test_the_table_has_the_rates_that_the_schedule_would_set(make: Make) -> None:
    drawn = optimizer()
    schedule = make(drawn)
    table = schedules.tabulate(schedule, drawn, STEPS)
    assert len(table) == STEPS + 1
    for row in table:  # the schedule itself has not been touched: it goes through the same rates now
        assert [group["lr"] for group in drawn.param_groups] == row
        if row is not table[-1]:
            drawn.step()
            schedule.step()


def test_the_server_sets_each_groups_rate_from_the_table() -> None:
    stepped = optimizer()
    schedule = StepSchedule(stepped, None, [[0.1, 0.2], [0.3, 0.4]])
    for steps, expected in ((0, [0.1, 0.2]), (1, [0.3, 0.4]), (7, [0.3, 0.4])):
        schedule.follow(steps)
        assert [group["lr"] for group in stepped.param_groups] == expected
        assert schedule.learning_rate == expected[0]
    schedule.load_state_dict(schedule.state_dict())


class Locked(ExponentialLR):
    def __deepcopy__(self, memo: object) -> "Locked":
        raise TypeError("cannot pickle a lock")


@pytest.mark.parametrize(
    ("make", "steps", "message"),
    [
        (partial(ExponentialLR, gamma=0.5), 0, 'ExponentialLR: the server needs its rates.*"total_steps"'),
        (partial(ExponentialLR, gamma=0.5), 300_000, "300000 steps are too many for a table of its rates"),
        (ReduceLROnPlateau, STEPS, "ReduceLROnPlateau follows a loss, not the number of steps"),
        (partial(OneCycleLR, max_lr=1.0, total_steps=3, cycle_momentum=False), STEPS, 'cannot take step 4 of "total'),
        (partial(OneCycleLR, max_lr=1.0, total_steps=STEPS), STEPS, "changes more than learning rates.*cycle_momentum"),
        (partial(Locked, gamma=0.5), STEPS, "Locked cannot be copied"),
    ],
)
def test_a_schedule_that_is_no_table_is_refused_in_one_line(make: Make, steps: int, message: str) -> None:
    drawn = optimizer()
    with pytest.raises(ConfigurationError, match=message) as caught:
        schedules.tabulate(make(drawn), drawn, steps)
    assert "\n" not in str(caught.value)


def test_deepspeeds_schedules_take_the_largest_rates_of_the_groups() -> None:
    served = optimizer()
    section: Any = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    assert schedules.is_deepspeeds(section)
    schedule = StepSchedule(served, schedules.build(section, served))
    schedule.follow(2)
    assert [group["lr"] for group in served.param_groups] == [0.5, 0.25]  # half of 1 and of 0.5
    with pytest.raises(ConfigurationError, match='"scheduler": "params": warmup_num_steps must be a positive integer'):
        schedules.build({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, served)
