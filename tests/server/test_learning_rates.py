"""A script's own learning-rate scheduler as a table of rates, and the optimizer that follows it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import ScheduleEvent, ScheduleReply
from fairseq_async.server.optimizers.learning_rates import (
    RateTable,
    StepCount,
    StepSchedule,
    begin_anew,
    check_table,
    tabulate,
)
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.halving import LAYOUT, build, halving_spec

STEPS = 6
Make = Callable[[Optimizer], Any]


def optimizer(rate: Any = 1.0) -> SGD:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return SGD([{"params": [one]}, {"params": [other], "lr": 0.5}], lr=rate, momentum=0.9)


def sequential(of: Optimizer) -> SequentialLR:
    return SequentialLR(of, [ConstantLR(of, 0.1, total_iters=2), ExponentialLR(of, 0.5)], milestones=[2])


def without_a_first(of: Optimizer) -> SequentialLR:
    """Of which the second scheduler begins at once."""
    return SequentialLR(of, [ConstantLR(of, 0.1, total_iters=2), ExponentialLR(of, 0.5)], milestones=[0])


def chained(of: Optimizer) -> ChainedScheduler:
    return ChainedScheduler([ConstantLR(of, 0.1, total_iters=2), ExponentialLR(of, 0.5)])


each_kind = pytest.mark.parametrize(
    "make",
    [
        partial(LambdaLR, lr_lambda=[lambda step: 0.5**step, lambda step: step / 10]),
        partial(CosineAnnealingLR, T_max=4),
        partial(OneCycleLR, max_lr=2.0, total_steps=STEPS + 1, cycle_momentum=False),
        partial(CyclicLR, base_lr=0.1, max_lr=2.0, step_size_up=2, cycle_momentum=False),
        partial(CosineAnnealingWarmRestarts, T_0=4),
        sequential,
        without_a_first,
        chained,
    ],
)
each_type = pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["a number", "a tensor"])


@each_kind
@each_type
def test_the_table_has_the_rates_that_the_scheduler_would_set(make: Make, rate: Any) -> None:
    drawn = optimizer(rate)
    scheduler = make(drawn)
    table = tabulate(scheduler, drawn, STEPS)
    assert len(table) == STEPS + 1
    for row in table:  # the scheduler itself has not been touched: it goes through the same rates now
        assert [float(group["lr"]) for group in drawn.param_groups] == pytest.approx(row)
        check_table(scheduler, 0, table)
        if row is not table[-1]:
            drawn.step()
            scheduler.step()


@each_kind
@each_type
@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_a_new_scheduler_of_an_optimizer_with_later_rates_begins_anew(
    make: Make, rate: Any, is_loaded_first: bool
) -> None:
    """As of one that was loaded from a checkpoint, before or after the scheduler was made."""
    saved = optimizer(copy.deepcopy(rate))
    scheduler = make(saved)
    expected = tabulate(scheduler, saved, STEPS)
    for _ in range(3):
        saved.step()
        scheduler.step()
    loaded = optimizer(copy.deepcopy(rate))
    made = None if is_loaded_first else make(loaded)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    made = made or make(loaded)
    begin_anew(made)
    assert tabulate(made, loaded, STEPS) == expected
    assert [float(each) for each in made.get_last_lr()] == expected[0]
    assert [float(group["lr"]) for group in loaded.param_groups] == expected[0]


def test_a_wrapped_optimizer_is_the_schedulers_own() -> None:
    """As accelerate wraps it."""
    drawn = optimizer()
    scheduler = CosineAnnealingLR(drawn, STEPS)
    expected = tabulate(scheduler, drawn, STEPS)
    wrapper = optimizer()
    wrapper.optimizer, wrapper.param_groups = drawn, drawn.param_groups  # type: ignore[attr-defined]
    scheduler.optimizer = wrapper
    assert tabulate(scheduler, drawn, STEPS) == expected


def test_each_groups_rate_is_set_from_the_table_and_the_last_ones_stay() -> None:
    stepped = optimizer()
    schedule = RateTable(stepped, [[0.1, 0.2], [0.3, 0.4]])
    for steps, expected in ((0, [0.1, 0.2]), (1, [0.3, 0.4]), (7, [0.3, 0.4])):
        schedule.follow(steps)
        assert [group["lr"] for group in stepped.param_groups] == expected
        assert schedule.learning_rate == expected[0]
    schedule.load_state_dict(schedule.state_dict())


def test_without_a_table_the_rates_stay() -> None:
    for schedule in (RateTable(stepped := optimizer(), []), StepSchedule(stepped)):
        schedule.follow(5)
        assert [group["lr"] for group in stepped.param_groups] == [1.0, 0.5]


def test_a_table_of_other_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not those of 2 parameter groups"):
        RateTable(optimizer(), [[0.1, 0.2], [0.3]])


class Locked(ExponentialLR):
    def __deepcopy__(self, memo: object) -> "Locked":
        raise TypeError("cannot pickle a lock")


def stepped(of: Optimizer) -> ExponentialLR:
    scheduler = ExponentialLR(of, 0.5)
    of.step()
    scheduler.step()
    return scheduler


def test_a_table_begins_where_its_scheduler_is() -> None:
    drawn = optimizer()
    expected = tabulate(ExponentialLR(drawn, 0.5), drawn, STEPS + 1)
    for make in (stepped, lambda of: ChainedScheduler([stepped(of)])):
        drawn = optimizer()
        scheduler = make(drawn)
        assert tabulate(scheduler, drawn, STEPS) == expected[1:]
        with pytest.raises(ConfigurationError, match=f"{type(scheduler).__name__} has taken 1 steps: give a new one"):
            tabulate(scheduler, drawn, STEPS, counted=True)


@pytest.mark.parametrize("of_run", [5, 100])
@pytest.mark.parametrize("often", [[0, 0, 0], [1, 1, 1], [1, 2, 1]], ids=["never", "once", "a skipped step"])
def test_a_scheduler_that_is_stepped_with_its_optimizer_or_never_is_right(often: list[int], of_run: int) -> None:
    drawn = optimizer()
    scheduler = ExponentialLR(drawn, 0.5)
    count = StepCount(scheduler, of_run)
    for steps in often * 3:
        count.before_step()
        drawn.step()
        for _ in range(steps):
            scheduler.step()
    count.before_step()
    assert scheduler.last_epoch <= of_run


@pytest.mark.parametrize(
    ("taken", "often"),
    [
        ([2, 2, 2], "more"),
        ([2, 2, 1, 2, 2], ""),
        ([1, 0, 0], "less"),
        ([0, 1], "less"),
        ([1, 0, 1, 0, 1], ""),
    ],
)
def test_a_scheduler_may_skip_one_step_in_a_row_and_take_two_twice(taken: list[int], often: str) -> None:
    """As with a GradScaler, which skips steps of the optimizer."""
    drawn = optimizer()
    scheduler = ExponentialLR(drawn, 0.5)
    count = StepCount(scheduler, 100)
    said = f"is stepped {often} often than the optimizer"
    with pytest.raises(ConfigurationError, match=said) if often else nullcontext():
        for steps in taken:
            count.before_step()
            drawn.step()
            for _ in range(steps):
                scheduler.step()
        count.before_step()


@pytest.mark.parametrize(
    ("make", "steps", "message"),
    [
        (partial(ExponentialLR, gamma=0.5), 0, "ExponentialLR: its learning rates become a table.*with --total-steps"),
        (partial(ExponentialLR, gamma=0.5), 300_000, "300000 steps of 2 parameter groups are more than 400000"),
        (ReduceLROnPlateau, STEPS, "ReduceLROnPlateau follows a loss that the server does not have"),
        (partial(OneCycleLR, max_lr=1.0, total_steps=3, cycle_momentum=False), STEPS, "cannot take step 4 of --total"),
        (partial(LambdaLR, lr_lambda=[1.0, 0.5].__getitem__), STEPS, "LambdaLR cannot take step 2 of .*IndexError"),
        (partial(OneCycleLR, max_lr=1.0, total_steps=STEPS), STEPS, "changes more than the learning rate.*cycle_mom"),
        (partial(Locked, gamma=0.5), STEPS, "Locked cannot be copied"),
        (lambda of: ExponentialLR(optimizer(), 0.5), STEPS, "ExponentialLR is the scheduler of another optimizer"),
    ],
)
def test_a_scheduler_that_is_no_table_is_refused_in_one_line(make: Make, steps: int, message: str) -> None:
    drawn = optimizer()
    with pytest.raises(ConfigurationError, match=message) as caught:
        tabulate(make(drawn), drawn, steps)
    assert "\n" not in str(caught.value)


FIRST = ScheduleEvent("x-1", "end_epoch", 1, 1.0)


SECOND = ScheduleEvent("x-2", "end_epoch", 2, 1.0)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ThreadServer(1, tmp_path, build=build) as server:
        client = Client(LastingConnection(server.address, server.token, 0, patience=30.0))
        client.join(LAYOUT, halving_spec())
        client.slot.zero_()
        assert client.initialise(None).assignment.learning_rate == 1.0
        yield client


def learning_rate(client: Client, event: ScheduleEvent) -> float:
    """The answer to an event with this number."""
    return client.connection.ask(event, ScheduleReply).learning_rate


def test_an_event_that_comes_again_is_answered_as_before_and_not_counted(client: Client) -> None:
    """Each end of an epoch halves the learning rate."""
    assert [learning_rate(client, event) for event in (FIRST, FIRST, FIRST)] == [0.5, 0.5, 0.5]
    assert [learning_rate(client, event) for event in (SECOND, SECOND)] == [0.25, 0.25]


def test_an_event_that_comes_again_on_another_connection_is_not_counted(client: Client) -> None:
    assert learning_rate(client, FIRST) == 0.5
    client.connection.channel.end()
    assert learning_rate(client, FIRST) == 0.5


def test_events_of_a_worker_that_was_started_again_are_others(client: Client) -> None:
    assert client.schedule_event("end_epoch", 1, 1.0).learning_rate == 0.5
    client.close()
    again = Client(LastingConnection(client.connection.address, client.connection.endpoint.token, 0, patience=30.0))
    again.join(LAYOUT, halving_spec())
    assert again.schedule_event("end_epoch", 2, 1.0).learning_rate == 0.25


def test_events_that_the_worker_means_twice_count_twice(client: Client) -> None:
    rates = [client.schedule_event("end_epoch", epoch, 1.0).learning_rate for epoch in (1, 2)]
    assert rates == [0.5, 0.25]
