"""DeepSpeed's own schedules, in the server by name or as a table of rates."""

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from fairseq_async.deepspeed_plugin import schedules
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.local_sgd import LocalEngine
from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.schedules import OwnRates
from fairseq_async.server.optimizers.learning_rates import present_rates, tabulate
from fairseq_async.worker.batches import BatchDigest
from fairseq_async.worker.start.context import WorkerContext

STEPS = 6


def optimizer() -> SGD:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return SGD([{"params": [one]}, {"params": [other], "lr": 0.5}], lr=1.0, momentum=0.9)


def test_a_schedule_that_the_script_gives_is_a_table_of_the_rates_that_it_would_set() -> None:
    drawn = optimizer()
    schedule = WarmupLR(drawn, warmup_num_steps=4)
    table = tabulate(schedule, drawn, STEPS)
    assert len(table) == STEPS + 1
    for row in table:  # the schedule itself has not been touched: it goes through the same rates now
        assert [group["lr"] for group in drawn.param_groups] == row
        if row is not table[-1]:
            drawn.step()
            schedule.step()


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """Collects that of earlier tests, such as their sockets: a warning of it is no warning of this test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("taken", [0, 5])
def test_a_schedule_follows_the_run_from_where_it_was_without_a_warning_of_torchs(taken: int) -> None:
    """The engine of local SGD sets the rates before its optimizer's first step, which torch takes for a mistake."""
    drawn = optimizer()
    schedule = LambdaLR(drawn, lambda step: 0.5**step)
    schedule.last_epoch = taken
    for group in drawn.param_groups:
        group["lr"] *= 0.5**taken
    followed = schedules.FollowedSchedule(schedule, drawn)
    for progress in (0, 1, 3):
        followed.follow(progress)
        assert [group["lr"] for group in drawn.param_groups] == [each * 0.5 ** (taken + progress) for each in (1, 0.5)]
    followed.check()
    drawn.step()
    schedule.step()
    with pytest.raises(ConfigurationError, match=f"moved the LambdaLR of the engine from step {taken + 3} to"):
        followed.check()


def warm_up_and_decay(drawn: SGD) -> SequentialLR:
    return SequentialLR(drawn, [LinearLR(drawn, 0.25, total_iters=2), CosineAnnealingLR(drawn, 4)], milestones=[2])


OF_TORCH: list[Callable[[SGD], LRScheduler]] = [
    lambda drawn: OneCycleLR(drawn, [1.0, 0.5], total_steps=STEPS + 1, cycle_momentum=False),
    lambda drawn: CosineAnnealingLR(drawn, STEPS),
    warm_up_and_decay,
]


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", OF_TORCH)
@pytest.mark.parametrize("taken", [0, 2])
def test_a_schedule_that_only_takes_steps_has_the_rates_of_the_runs_progress(
    make: Callable[[SGD], LRScheduler], taken: int
) -> None:
    """A fast worker takes more steps than the run has, and a restarted one goes on where the run is."""
    schedule = make(drawn := optimizer())
    for _ in range(taken):
        drawn.step()
        schedule.step()
    steps = STEPS - taken
    expected = tabulate(schedule, drawn, steps)
    followed = schedules.FollowedSchedule(schedule, drawn, steps)
    for progress, row in [(0.0, 0), (0.5, 0), (0.7 + 0.1 + 0.2, 1), (2.9, 2), (steps, steps), (steps + 4, steps)]:
        followed.follow(progress)
        assert present_rates(drawn) == expected[row]
    state, groups = copy.deepcopy((schedule.state_dict(), drawn.state_dict()))
    schedule = make(drawn := optimizer())
    again = schedules.FollowedSchedule(schedule, drawn, steps)
    schedule.load_state_dict(state)
    drawn.load_state_dict(groups)
    again.load_state_dict(followed.state_dict())
    again.follow(3.0)
    assert present_rates(drawn) == expected[3]
    again.check()


def test_a_schedule_that_only_takes_steps_needs_the_length_of_the_run_and_is_not_for_adascale() -> None:
    schedule = OF_TORCH[0](drawn := optimizer())
    with pytest.raises(ConfigurationError, match="OneCycleLR: its learning rates become a table of the run's steps"):
        schedules.FollowedSchedule(schedule, drawn, 0)
    with pytest.raises(ConfigurationError, match="OneCycleLR cannot follow the scale-invariant steps of adascale"):
        schedules.check_schedule(schedule)


@pytest.mark.parametrize(("saved", "begins_at"), [(2, 2), (0, 0), (None, 5)])
def test_a_loaded_schedule_goes_on_from_an_ordinary_runs_position_and_from_that_of_this_run_once(
    saved: int | None, begins_at: int
) -> None:
    """A checkpoint of an asynchronous run says where its schedule began; its count has the run's progress in it. The
    first step is at the optimizer's own rate, as in a plain loop where that was not loaded."""
    drawn = optimizer()
    schedule = WarmupLR(drawn, warmup_num_steps=4)
    followed = schedules.FollowedSchedule(schedule, drawn)
    schedule.load_state_dict({"last_batch_iteration": 4})
    drawn.param_groups[0]["lr"] = 0.25
    if saved is None:
        followed.begin()
    else:
        followed.load_state_dict({"begins_at": saved, "rates": [0.25, 0.0]})
    followed.follow(0.0)
    assert followed.state_dict() == {"begins_at": begins_at, "rates": [0.25, 0.0]}
    assert drawn.param_groups[0]["lr"] == 0.25
    followed.follow(1.0)
    assert schedule.last_batch_iteration == begins_at


def test_deepspeeds_schedules_take_the_largest_rates_of_the_groups() -> None:
    served = optimizer()
    section: Any = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    assert schedules.is_deepspeeds(section)
    schedule = schedules.NamedSchedule(served, schedules.build(section, served))
    schedule.follow(2)
    own = optimizer()
    WarmupLR(own, warmup_num_steps=2, warmup_type="linear").step(1)
    rates = [group["lr"] for group in own.param_groups]  # half of 1 and of 0.5; before DeepSpeed 0.19 half of 1 twice
    assert [group["lr"] for group in served.param_groups] == rates and max(rates) == 0.5
    again = schedules.NamedSchedule(other := optimizer(), schedules.build(section, other))
    again.load_state_dict(schedule.state_dict())
    again.follow(3)
    assert again.learning_rate == 1.0
    with pytest.raises(ConfigurationError, match='"scheduler": "params": expected 2 value for min_lr'):
        schedules.build({"type": "WarmupLR", "params": {"warmup_min_lr": [0.0]}}, served)


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> LocalEngine:
    """An engine that is set up, and has not joined; of DeepSpeed's engine it has what that needs."""
    engine = LocalEngine.__new__(LocalEngine)
    nn.Module.__init__(engine)
    engine.__dict__["module"] = model  # as DeepSpeed's constructor sets it
    engine.optimizer, engine.basic_optimizer, engine.lr_scheduler = optimizer, optimizer, None
    cast(Any, engine).zero_optimization_partition_weights = lambda: False
    refusals, context = SimpleNamespace(limit=3), WorkerContext()
    worker = SimpleNamespace(refusals=refusals, finished=False, joined=True, batches=BatchDigest())
    AsyncEngine.set_up(engine, cast(Any, worker), cast(Any, None), cast(Any, context), Path("run"))
    return engine


@pytest.mark.parametrize("kind", ["a scheduler", "the loop", "a metric", "the engine"])
def test_a_schedule_of_a_workers_own_steps_is_one_line(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = cast(Any, prepared(model, optimizer))
    engine._own_rates, engine.async_worker.total_progress = OwnRates(optimizer, "give one"), 0.0
    engine._check_followed()
    engine.async_worker.total_progress = 1.0
    optimizer.param_groups[0]["lr"] = 0.2 * engine.progress
    engine._check_followed()
    if kind == "the loop":
        optimizer.param_groups[0]["lr"] = 0.3
    elif kind == "a metric":  # looked at after an exchange
        optimizer.param_groups[0]["lr"], engine.async_worker.total_progress = 0.3, 2.0
    else:
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        engine.lr_scheduler = scheduler if kind == "the engine" else None
    with pytest.raises(SystemExit):
        engine._check_followed()
    said = "given the engine another lr_scheduler" if kind == "the engine" else "of SGD by this worker's own steps"
    assert said in capsys.readouterr().err


def test_a_schedule_in_the_server_goes_on_from_where_it_was() -> None:
    first, second = (schedules.NamedSchedule(drawn := optimizer(), WarmupLR(drawn, warmup_num_steps=4)) for _ in "12")
    first.follow(3)
    assert second.state_dict() != first.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_a_section_names_one_of_deepspeeds_schedules_with_arguments_or_without() -> None:
    assert not schedules.is_deepspeeds(None) and not schedules.is_deepspeeds({"type": "CosineAnnealingLR"})
    assert type(schedules.build({"type": "WarmupLR"}, optimizer())) is WarmupLR
    with pytest.raises(ConfigurationError, match='"params" is 3: it must be an object'):
        schedules.build({"type": "WarmupLR", "params": 3}, optimizer())


def test_a_schedule_that_can_go_to_a_count_needs_no_table() -> None:
    drawn = optimizer()
    for schedule in (None, WarmupLR(drawn), LambdaLR(drawn, lambda step: 1.0)):
        assert not schedules.needs_table(schedule)
        assert schedules.FollowedSchedule(schedule, drawn, STEPS)._table is None
    cosine = CosineAnnealingLR(drawn, STEPS)
    assert schedules.needs_table(cosine) and schedules.FollowedSchedule(cosine, drawn)._table is None


@pytest.mark.parametrize(("progress", "steps"), [(0.0, []), (0.75, []), (1.0, [0]), (3.75, [2])])
def test_a_schedule_of_deepspeeds_is_set_to_the_whole_steps_before(progress: float, steps: list[int]) -> None:
    """Which of the first step it has not taken yet."""
    schedule, taken = WarmupLR(optimizer(), warmup_num_steps=4), list[object]()
    schedule.step = taken.append
    schedules.set_schedule(schedule, progress)
    assert taken == steps and all(type(each) is int for each in taken)
    schedules.set_schedule(None, progress)
    of_torch = LambdaLR(optimizer(), lambda step: 1.0 / (1 + step))
    schedules.set_schedule(of_torch, progress)
    assert (of_torch.last_epoch, of_torch.get_last_lr()[0]) == (int(progress), 1.0 / (1 + int(progress)))
    assert type(of_torch.last_epoch) is int


@pytest.mark.parametrize("progress", [0, 3])
def test_a_schedule_that_a_table_stands_for_shows_its_rates(progress: int) -> None:
    """Within the optimizer that ZeRO and fp16 wrap."""
    drawn = optimizer()
    schedule = CosineAnnealingLR(drawn, STEPS)
    wrapper: Any = SimpleNamespace(optimizer=drawn, param_groups=drawn.param_groups)
    followed = schedules.FollowedSchedule(schedule, wrapper, STEPS)
    expected = tabulate(schedule, drawn, STEPS)[progress]
    followed.follow(progress)
    assert present_rates(drawn) == schedule.get_last_lr() == expected
    for without in (None, object()):
        schedules.show_rates(cast(Any, without), drawn)
