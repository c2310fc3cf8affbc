"""Learning-rate schedules of a plain loop: they follow the run, or end the worker with one line."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.pytorch.schedules import OwnRates, ProgressSchedule
from fairseq_async.server.plan import whole_steps
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.plain_loop import AS_IT_IS, STEPS, backward, flat, net
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS, cycle_momentum=False),
}


@pytest.mark.parametrize("case", SCHEDULERS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_schedule_of_local_sgd_follows_the_run(workers: Start, case: str, count: int) -> None:
    """Whatever a worker's own number of steps is: its rates are those of the run's progress."""

    def train(worker: int) -> list[tuple[float, float]]:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        rates = []
        scheduler = SCHEDULERS[case](optimizer)
        with AsyncLocalSGD(model, optimizer, scheduler, total_steps=STEPS, **AS_IT_IS) as training:
            while not training.finished:
                rates.append((training.async_worker.run_progress, optimizer.param_groups[0]["lr"]))
                optimizer.zero_grad()
                backward(model, len(rates), worker)
                optimizer.step()
        return rates

    plain = SGD(net().parameters(), lr=0.1)
    schedule, wanted = SCHEDULERS[case](plain), []
    for _ in range(STEPS):
        wanted.append(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()
    for rates in workers(count, local_sgd_main.build).run(train):
        assert [rate for _, rate in rates] == [wanted[whole_steps(progress)] for progress, _ in rates]
        assert count > 1 or [rate for _, rate in rates] == wanted


@pytest.mark.parametrize("make", [AsyncLocalSGD, HybridAsync])
def test_a_run_that_goes_on_has_the_rates_of_its_position(workers: Start, make: Any) -> None:
    """Though the optimizer is loaded with the rates of the checkpoint, and its scheduler is new."""
    is_local, half = make is AsyncLocalSGD, STEPS // 2
    build = local_sgd_main.build if is_local else gradient_main.build
    options = (AS_IT_IS if is_local else {"updates_per_step": 1}) | {"total_steps": STEPS}
    saved: list[Any] = []

    def train(worker: int) -> Tensor:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        if saved:
            optimizer.load_state_dict(saved[1])
        scheduler = SCHEDULERS["cosine"](optimizer)
        block = make(model, optimizer, scheduler, **options)
        block.load_state_dict(saved[0] if saved else {})
        with block as training:
            for step in range(half if saved else 0, STEPS):
                model.zero_grad()
                backward(model, step)
                optimizer.step()
                if not is_local:
                    scheduler.step()
                if step == half - 1:
                    with training.server_parameters():
                        saved[:] = training.state_dict(), copy.deepcopy(optimizer.state_dict())
        return flat(model)

    (whole,) = workers(1, build).run(train)
    (second,) = workers(1, build).run(train)
    assert torch.equal(whole, second)
    assert saved[1]["param_groups"][0]["lr"] < 0.1


def test_a_slow_worker_behind_the_others_last_step_has_the_schedules_last_rate(workers: Start) -> None:
    """Its estimate of the run's progress is beyond the end, where OneCycleLR climbs again, and others fall below 0."""

    def train(worker: int) -> list[float]:
        model, rates = net(), []
        optimizer = SGD(model.parameters(), lr=0.1)
        given = AS_IT_IS | {"local_steps": STEPS, "total_steps": STEPS}
        with AsyncLocalSGD(model, optimizer, SCHEDULERS["one cycle"](optimizer), **given) as training:
            local = training.async_worker
            local.assignment = replace(local.assignment, progress_per_step=5.0)
            while not training.finished:
                rates.append(optimizer.param_groups[0]["lr"])
                backward(model, len(rates))
                optimizer.step()
        return rates

    (rates,) = workers(1, local_sgd_main.build).run(train)
    assert len(rates) == STEPS and rates[2:] == pytest.approx([0.0034567] + [4e-7] * (STEPS - 3), rel=1e-4)


def test_each_of_several_optimizers_follows_its_schedule_and_loses_its_own_step_to_nan(workers: Start) -> None:
    """The round of a step that is left out is a local step by the other optimizer's."""
    spoilt = {2: 0, 3: 1, 7: 1}  # by step: the optimizer whose gradients have NaN

    def made() -> tuple[nn.Module, list[Optimizer], list[LRScheduler]]:
        model = net()
        both: list[Optimizer] = [SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.02)]  # type: ignore[index]
        return model, both, [schedule(of) for schedule, of in zip(SCHEDULERS.values(), both, strict=True)]

    def gradients(model: nn.Module, step: int) -> None:
        model.zero_grad()
        backward(model, step)
        if step in spoilt:
            model[2 * spoilt[step]].bias.grad.fill_(float("nan"))  # type: ignore[index]

    def train(worker: int) -> Tensor:
        model, both, schedulers = made()
        with AsyncLocalSGD(model, both, schedulers, total_steps=STEPS, **AS_IT_IS) as training:
            for step in range(STEPS):
                gradients(model, step)
                for optimizer in both:
                    optimizer.step()
            assert training.finished
        return flat(model)

    (ended,) = workers(1, local_sgd_main.build).run(train)
    plain, both, schedulers = made()
    for step in range(STEPS):
        gradients(plain, step)
        for number, optimizer in enumerate(both):
            if spoilt.get(step) != number:
                optimizer.step()
            schedulers[number].step()
    torch.testing.assert_close(ended, flat(plain))


def plateau(optimizer: Optimizer) -> Callable[[int], object]:
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    return lambda step: scheduler.step(1.0)


def by_a_metric(optimizer: Optimizer) -> Callable[[int], object]:
    """Of a class of the script's own, which is no scheduler of torch; it looks after each exchange."""

    def step(number: int) -> None:
        if number % 3 == 2:
            optimizer.param_groups[0]["lr"] *= 0.5

    return step


def by_the_loop(optimizer: Optimizer) -> Callable[[int], object]:
    return lambda step: optimizer.param_groups[0].update(lr=0.1 / (1 + step))


OWN_SCHEDULES: dict[str, tuple[Callable[[Optimizer], Callable[[int], object]], int]] = {  # and the last step
    "a scheduler": (lambda optimizer: (each := CosineAnnealingLR(optimizer, STEPS)) and (lambda _: each.step()), 0),
    "a plateau": (plateau, 1),
    "a rate of a metric": (by_a_metric, 2),
    "a rate of the loop": (by_the_loop, 1),
}


@pytest.mark.parametrize("case", OWN_SCHEDULES)
def test_a_schedule_that_is_stepped_by_hand_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        make, last = OWN_SCHEDULES[case]
        after_step = make(optimizer)
        with pytest.raises(SystemExit):
            with AsyncLocalSGD(model, optimizer, total_steps=STEPS, **AS_IT_IS):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    backward(model, step, worker)
                    optimizer.step()
                    assert step <= last
                    after_step(step)

    workers(2, local_sgd_main.build).run(train)
    assert capfd.readouterr().err.count("give it as scheduler=") == 2


def test_a_rate_that_the_loop_takes_from_the_progress_of_the_run_is_taken(
    workers: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """And named once, as a loop that reads the progress for its log may take the rate from something else."""

    def train(worker: int) -> set[float]:
        model, rates = net(), set()
        optimizer = SGD(model.parameters(), lr=0.1)
        with AsyncLocalSGD(model, optimizer, total_steps=STEPS, **AS_IT_IS) as training:
            while not training.finished:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + training.progress)
                rates.add(optimizer.param_groups[0]["lr"])
                backward(model, 0, worker)
                optimizer.step()
        return rates

    rates = workers(2, local_sgd_main.build).run(train)
    assert max(map(len, rates)) > 2
    said = capfd.readouterr().err.count("warning: the loop changes the learning rate of SGD")
    assert said == sum(len(each) > 1 for each in rates)


def one_cycle(of: Optimizer, steps: int = STEPS) -> OneCycleLR:
    return OneCycleLR(of, 0.1, total_steps=steps, cycle_momentum=False)


@pytest.mark.parametrize(
    "make",
    [
        one_cycle,
        lambda of: SequentialLR(of, [ConstantLR(of), one_cycle(of, STEPS - 2)], [2]),
        lambda of: ChainedScheduler([ConstantLR(of), one_cycle(of)]),  # it does not count itself
    ],
    ids=["one", "in sequence", "chained"],
)
def test_a_loop_may_step_its_scheduler_more_often_than_the_run_has_steps(
    workers: Start, make: Callable[[Optimizer], Any]
) -> None:
    """OneCycleLR raises an error for a step more than its own."""

    def train(worker: int) -> bool:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = make(optimizer)
        with HybridAsync(model, optimizer, scheduler=scheduler, updates_per_step=2, total_steps=STEPS) as training:
            for _ in range(2 * STEPS):  # alone, it takes two steps for each one of the server
                optimizer.zero_grad()
                training.loss = model(torch.ones(4, 5)).sum()
                training.loss.backward()
                optimizer.step()
                scheduler.step()
            return training.finished

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a loss with its graph is made a number
        assert workers(1, gradient_main.build).run(train) == [True]


@pytest.mark.parametrize(
    "make",
    [lambda of: CosineAnnealingWarmRestarts(of, 4), lambda of: LambdaLR(of, lambda epoch: 0.5**epoch)],
    ids=["restarts", "function"],
)
def test_a_scheduler_that_is_stepped_by_parts_of_an_epoch_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], make: Callable[[Optimizer], Any]
) -> None:
    """In the first epoch, too, as torch's own example has it: the server would go on by steps of the optimizer."""

    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = make(optimizer)
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, scheduler, total_steps=STEPS):
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                assert step < 2
                scheduler.step(step / STEPS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it, but for CosineAnnealingWarmRestarts
        workers(1, gradient_main.build).run(train)
    assert "is stepped by parts of an epoch" in capfd.readouterr().err


class Outside(LRScheduler):
    """One whose rates follow from something that its script sets."""

    factor = 1.0

    def get_lr(self) -> list[float | Tensor]:
        return [self.factor * rate for rate in self.base_lrs]


@pytest.mark.parametrize("method", ["hybrid", "local"])
@pytest.mark.parametrize("kind", ["a class", "a function", "a function that the loop does not step"])
def test_rates_that_follow_from_something_else_than_steps_are_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], kind: str, method: str
) -> None:
    """Where the loop steps the scheduler with AsyncLocalSGD, that is the mistake."""

    def train(worker: int) -> None:
        model, factor = net(), [1.0]
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = Outside(optimizer) if kind == "a class" else LambdaLR(optimizer, lambda step: factor[0])
        make = HybridAsync if method == "hybrid" else AsyncLocalSGD
        with pytest.raises(SystemExit, match="2"), make(model, optimizer, scheduler, total_steps=STEPS):
            for step in range(STEPS):
                if step == 2:
                    factor[0] = scheduler.factor = 0.1  # type: ignore[attr-defined]
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                assert step < 3
                if "not" not in kind and (method == "hybrid" or step == 2):
                    scheduler.step()

    workers(1, local_sgd_main.build if method == "local" else gradient_main.build).run(train)
    stepped = method == "local" and kind == "a class"
    said = "follows the progress of the run" if stepped else "use a scheduler whose rates depend on"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_that_is_stepped_before_its_optimizer_is_named_once(
    workers: Start, capsys: pytest.CaptureFixture[str], early: bool
) -> None:
    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        with HybridAsync(model, optimizer, scheduler=scheduler, total_steps=STEPS):
            for step in range(3):
                if early:
                    scheduler.step()
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                if not early:
                    scheduler.step()

    workers(1, gradient_main.build).run(train)
    assert capsys.readouterr().err.count("was stepped before the first optimizer.step()") == early


def test_a_trainers_schedule_says_where_it_is_also_where_its_run_began_amid_it(following: Any) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    worker: Any = SimpleNamespace(run_progress=3.0)
    began = following.RunSchedule(scheduler, optimizer, worker, 9, resumed=False)
    assert (began.state_dict()["last_epoch"], began.get_last_lr()) == (5, [1 / 6])
    assert scheduler.get_last_lr() == [1 / 6] == [optimizer.param_groups[0]["lr"]]  # which callbacks are given
    loaded = LambdaLR(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), lambda step: 1 / (1 + step))
    loaded.load_state_dict(began.state_dict())
    assert following.RunSchedule(loaded, loaded.optimizer, worker, 9, resumed=True).state_dict()["last_epoch"] == 5


OTHERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    **SCHEDULERS,
    "sequential": lambda of: SequentialLR(of, [ConstantLR(of, 0.1, 2), CosineAnnealingLR(of, STEPS)], [2]),
    "chained": lambda of: ChainedScheduler([ConstantLR(of, 0.1, 2), CosineAnnealingLR(of, STEPS)]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_trainer_goes_on_with_a_scheduler_of_the_script(following: Any, case: str) -> None:
    """Its checkpoint has the scheduler at the run's position, and the optimizer's rate there."""

    def made() -> tuple[LRScheduler, Optimizer]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return OTHERS[case](optimizer), optimizer

    worker: Any = SimpleNamespace(run_progress=0.0)

    def rates(schedule: Any, begin: int) -> list[list[float]]:
        found = []
        for worker.run_progress in range(begin, STEPS):  # noqa: B020 - the schedule asks for it
            schedule.step()
            found.append(schedule.get_last_lr())
        return found

    began = following.RunSchedule(*made(), worker, STEPS, resumed=False)
    whole = rates(began, 0)
    worker.run_progress = 6.0
    began.step()
    scheduler, optimizer = made()
    scheduler.load_state_dict(began.state_dict())
    optimizer.param_groups[0]["lr"] = whole[6][0]
    following.take_back(scheduler)
    assert rates(following.RunSchedule(scheduler, optimizer, worker, STEPS, resumed=True), 6) == whole[6:]


def test_a_trainers_schedule_of_before_its_run_cannot_be_taken_back(
    following: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler = CosineAnnealingLR(SGD([nn.Parameter(torch.zeros(1))], lr=0.1), STEPS)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 7, "begins_at": 2})
    with pytest.raises(SystemExit, match="2"):
        following.take_back(scheduler)
    assert "CosineAnnealingLR of the checkpoint had taken 2 steps before the run" in capfd.readouterr().err


def test_a_trainer_does_what_is_due_where_the_run_has_passed_a_multiple(following: Any) -> None:
    """Others take steps between two of its own."""
    worker: Any = SimpleNamespace(finished=False)
    state, handler = following.TrainerState(max_steps=30, logging_steps=10, save_steps=7), SimpleNamespace(callbacks=[])
    trainer: Any = SimpleNamespace(state=state, callback_handler=handler)
    trainer._maybe_log_save_evaluate = trainer.get_batch_samples = None
    args: Any = SimpleNamespace(logging_strategy="steps", eval_strategy="no", save_strategy="steps")
    args.logging_first_step, args.eval_delay, args.gradient_accumulation_steps = False, 0, 1
    flow, seen = following.FollowRun(trainer, lambda: worker, lambda control: None, lambda: None), []
    for worker.run_progress in (4.0, 8.5, 13.0, 13.2, 21.0, 27.9):
        control = following.TrainerControl()
        state.global_step += 1  # the Trainer's own count
        flow.on_step_end(args, state, control)
        seen.append((state.global_step, control.should_log, control.should_save))
    assert seen == [
        (4, False, False), (8, False, True), (13, True, False), (13, False, False), (21, True, True), (27, False, False)
    ]  # fmt: skip


@pytest.mark.parametrize("taken", [0, 2])
def test_a_worker_that_joins_late_has_its_schedulers_own_first_rates_unless_that_has_taken_steps(taken: int) -> None:
    """Of a new scheduler, the optimizer may have been loaded with later ones; of a loaded one, these are its own."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler = ExponentialLR(optimizer, 0.5)
    for _ in range(taken):
        optimizer.step()
        scheduler.step()
    if not taken:
        optimizer.param_groups[0]["lr"] = 0.1
    schedule = ProgressSchedule(optimizer, scheduler, total_steps=5)
    schedule.join(3.0)
    schedule.follow(3.0 - 1e-9)  # as parts of steps may add up
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8 * 0.5 ** (taken + 3))


@pytest.mark.parametrize(
    ("workers", "total_steps", "of_trainer", "checked"),
    [(3, 6, False, [1.5]), (1, 6, False, []), (3, 0, False, []), (3, 6, True, [])],
)
def test_the_rates_of_a_loop_are_watched_where_workers_have_steps_of_their_own_and_a_run_that_ends(
    workers: int, total_steps: int, of_trainer: bool, checked: list[float]
) -> None:
    """A ``Trainer`` has a schedule that follows the run; a run without an end has no last step."""
    optimizer, seen = SGD([nn.Parameter(torch.zeros(1))], lr=0.1), list[float]()
    run: Any = SimpleNamespace(workers=workers, of_trainer=of_trainer, _schedules={})
    run.options, run.async_worker = SimpleNamespace(total_steps=total_steps), SimpleNamespace(total_progress=1.5)
    run._own_rates = {id(optimizer): SimpleNamespace(check=seen.append)}
    AsyncLocalSGD._check_schedule(run, optimizer)
    assert seen == checked


@pytest.mark.parametrize("case", ["it has asked before the last step alone", "the progress is what it was"])
def test_a_rate_is_of_the_run_where_the_progress_is_another_and_the_loop_has_asked_for_it(case: str) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rates = OwnRates(optimizer, "give it as scheduler=")
    rates.check(0.0)
    for progress, asked, lr in ((1.0, True, 0.2), (2.0 if "asked" in case else 1.0, "asked" not in case, 0.3)):
        rates.asked, optimizer.param_groups[0]["lr"] = rates.asked or asked, lr
        with nullcontext() if lr == 0.2 else pytest.raises(ConfigurationError, match="by this worker's own steps"):
            rates.check(progress)
