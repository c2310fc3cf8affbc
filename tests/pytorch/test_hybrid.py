"""``HybridAsync`` round an ordinary optimizer, against plain synchronous training by the mean gradient."""

import copy
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
STEPS = 6


def model_of(seed: int = 0) -> nn.Module:
    """With a generator of its own: workers are threads of one process, which share torch's."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return model


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    inputs = torch.randn(4, 5, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    inputs, targets = batch(worker, step)
    return nn.functional.mse_loss(model(inputs), targets)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def decayed_and_not(model: nn.Module) -> list[dict[str, Any]]:
    """Interleaved runs of the flat buffer: weights decay, biases do not; the last bias does not move."""
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": [model[0].bias], "weight_decay": 0.0, "lr": 0.02},  # type: ignore[index]
        {"params": [model[2].bias], "lr": 0.0},  # type: ignore[index]
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD with momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda model: Adam(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "AdamW of groups": lambda model: AdamW(decayed_and_not(model), lr=0.01, amsgrad=True),
}
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up, then cosine": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, STEPS)], [3]
    ),
}


def synchronous(
    model: nn.Module, optimizer: Optimizer, workers: int, scheduler: LRScheduler | None = None, clip: float = 0.0
) -> Tensor:
    """Plain training of one process by the mean of the workers' gradients, in the server's order of summation."""
    for step in range(STEPS):
        gradients = []
        for worker in range(workers):
            optimizer.zero_grad()
            loss_of(model, worker, step).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = parts[0]
            for count, part in enumerate(parts[1:], start=2):
                parameter.grad.lerp_(part, 1 / count)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return flat(model)


def asynchronous(
    team: ThreadWorkers,
    make: Callable[[nn.Module], Optimizer],
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Where each worker ends; its loop is that of any script."""

    def train(worker: int) -> Tensor:
        model = model_of(worker)  # all are worker 0's in the end
        optimizer = make(model)
        scheduler = None if schedule is None else schedule(optimizer)
        with HybridAsync(model, optimizer, scheduler=scheduler, barrier=True, total_steps=STEPS, **options) as training:
            step = 0
            while not training.finished:
                optimizer.zero_grad()
                loss_of(model, worker, step).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                step += 1
        assert not optimizer.state and step == STEPS
        return flat(model)

    return team.run(train)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_with_a_barrier_it_is_synchronous_training_to_the_bit(workers: Start, make: Any) -> None:
    model = model_of()
    expected = synchronous(model, make(model), workers=2)
    for ended in asynchronous(workers(2, gradient_main.build), make):
        assert torch.equal(ended, expected)


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_the_server_takes_the_rates_of_a_scheduler_by_its_own_steps(workers: Start, schedule: Any) -> None:
    make, model = OPTIMIZERS["AdamW of groups"], model_of()
    optimizer = make(model)
    expected = synchronous(model, optimizer, 2, schedule(optimizer))
    for ended in asynchronous(workers(2, gradient_main.build), make, schedule):
        assert torch.equal(ended, expected)


def test_the_server_clips_the_mean_gradient(workers: Start) -> None:
    make, model = OPTIMIZERS["Adam"], model_of()
    expected = synchronous(model, make(model), 2, clip=0.1)
    for ended in asynchronous(workers(2, gradient_main.build), make, clip_norm=0.1):
        torch.testing.assert_close(ended, expected, rtol=1e-6, atol=1e-7)  # the norm is summed in another order
    assert not torch.allclose(expected, synchronous(model_of(), make(model_of()), 2))


def test_several_backward_passes_are_one_step_and_a_loss_scale_is_taken_out(workers: Start) -> None:
    """Powers of two change no bit. The first scale is too large, and its step is skipped as torch skips it. Fused
    kernels round the ends of vectors otherwise, which are others in the server."""

    def train(worker: int, scale: float, fused: bool) -> Tensor:
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with HybridAsync(model, optimizer, updates_per_step=1, total_steps=STEPS) as training:
            for step in range(STEPS + 1):
                optimizer.zero_grad()
                infinite = 1e20 if step == 0 else 1.0
                scaler.scale(infinite * loss_of(model, 0, step)).backward()
                scaler.scale(infinite * loss_of(model, 1, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert training.finished and training.progress == STEPS
        return flat(model)

    for fused in (False, True):
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            loss_of(model, 1, step).backward()
            optimizer.step()
        (ended,) = workers(1, gradient_main.build).run(lambda worker, fused=fused: train(worker, 2.0**100, fused))  # type: ignore[misc]
        assert torch.allclose(ended, flat(model), rtol=0, atol=1e-6) if fused else torch.equal(ended, flat(model))


@pytest.mark.parametrize("total_steps", [0, 100], ids=["no end", "an end that nobody comes to"])
@pytest.mark.parametrize("local", [False, True], ids=["hybrid", "local SGD"])
@pytest.mark.parametrize("slow", [0, 1])
def test_loops_that_end_by_their_own_count_end_together_with_the_finished_model(
    workers: Start, local: bool, slow: int, total_steps: int
) -> None:
    """The slow worker takes its second to ninth step after the other's loop has ended."""
    other_ended = threading.Event()

    def train(worker: int) -> Tensor:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        front_end = partial(AsyncLocalSGD, local_steps=2) if local else HybridAsync
        with front_end(model, optimizer, total_steps=total_steps) as training:
            for step in range(9 if worker == slow else 2):
                optimizer.zero_grad()
                loss_of(model, worker, step).backward()
                optimizer.step()
                assert not training.finished
                if worker == slow:
                    assert other_ended.wait(20)
            other_ended.set()
        assert training.finished
        return flat(model)

    run = workers(2, (local_sgd_main if local else gradient_main).build)
    first, second = run.run(train)
    assert run.server.service.run is not None
    final = run.server.service.run.coordinator.server
    assert torch.equal(first, second) and torch.equal(first, final.parameters)
    assert final.sequences == ({slow: 4, 1 - slow: 0} if local else {slow: 8, 1 - slow: 1})


def test_a_gradient_with_nan_is_refused_and_a_step_after_the_end_changes_nothing(
    workers: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(worker: int) -> tuple[Tensor, Tensor]:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        seen = []
        with HybridAsync(model, optimizer, updates_per_step=1, total_steps=2) as training:
            for step in range(5):
                optimizer.zero_grad()
                (loss_of(model, 0, step) * (float("nan") if step == 0 else 1.0)).backward()
                optimizer.step()
                seen.append(flat(model))
            assert training.progress == 2.0
        return seen[2], seen[4]

    ((at_the_end, later),) = workers(1, gradient_main.build).run(train)
    assert torch.equal(at_the_end, later) and later.isfinite().all()
    assert capsys.readouterr().err.count("the run has finished") == 1


def test_a_worker_hears_at_once_that_its_gradient_with_nan_was_refused(workers: Start) -> None:
    def train(worker: int) -> int:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        with HybridAsync(model, optimizer, updates_per_step=4, total_steps=9) as training:
            for factor in (1.0, math.nan, math.inf):
                optimizer.zero_grad()
                (loss_of(model, 0, 0) * factor).backward()
                optimizer.step()
            return training.async_worker.refusals.in_a_row

    assert workers(1, gradient_main.build).run(train) == [2]


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
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = make(optimizer)
        with HybridAsync(model, optimizer, scheduler=scheduler, updates_per_step=2, total_steps=STEPS) as training:
            for step in range(2 * STEPS):  # alone, it takes two steps for each one of the server
                optimizer.zero_grad()
                training.loss = loss_of(model, 0, step)
                training.loss.backward()
                optimizer.step()
                scheduler.step()
            return training.finished

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a loss with its graph is made a number
        assert workers(1, gradient_main.build).run(train) == [True]


def test_a_saved_state_goes_on_as_if_nothing_had_happened(workers: Start, tmp_path: Path) -> None:
    """Also the moments, and the position of the schedule, which are in the server."""

    def train(steps: range, state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=0.01)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        options = {"updates_per_step": 1, "total_steps": STEPS, "run_dir": str(tmp_path / "own")}
        training = HybridAsync(model, optimizer, scheduler=scheduler, **options)
        if state is not None:
            training.load_state_dict(state)
        with training:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
            with training.server_parameters():
                saved = copy.deepcopy(training.state_dict())
                assert torch.equal(flat(model), saved["server"]["parameters"])
        return flat(model), saved

    build = gradient_main.build
    ((whole, _),) = workers(1, build).run(lambda worker: train(range(STEPS), None))
    ((_, state),) = workers(1, build).run(lambda worker: train(range(2), None))
    ((resumed, _),) = workers(1, build).run(lambda worker: train(range(2, STEPS), state))
    assert torch.equal(whole, resumed)


def test_an_exception_where_the_model_has_the_servers_parameters_is_the_one_that_is_seen(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was changed before it stays changed, as in torch, which ends the worker at the next step."""

    def train(worker: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, run_dir=str(tmp_path)) as training:
            own = next(model.parameters()).clone()
            with pytest.raises(ZeroDivisionError), training.server_parameters(), torch.no_grad():
                next(model.parameters()).add_(1.0)
                raise ZeroDivisionError
            assert torch.equal(next(model.parameters()), own + 1.0)
            loss_of(model, 0, 0).backward()
            optimizer.step()

    workers(1, gradient_main.build).run(train)
    assert "0.weight" in capfd.readouterr().err


def test_a_hook_before_the_step_that_would_come_too_late_is_one_line(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(worker: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        seen = list[bool]()
        optimizer.register_step_pre_hook(lambda *of_step: seen.append(next(model.parameters()).grad is not None))
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, run_dir=str(tmp_path / "own")):
            for step in range(2):
                loss_of(model, 0, step).backward()
                optimizer.step()
                optimizer.register_step_pre_hook(lambda *of_step: None)
        assert seen == [True, True]

    workers(1, gradient_main.build).run(train)
    assert "error: a hook before optimizer.step() was registered within the block" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("done", "change"),
    [
        (
            "loaded or cleared",
            lambda optimizer: optimizer.load_state_dict(
                Adam(optimizer.param_groups[0]["params"], lr=0.01).state_dict()
            ),
        ),
        ("loaded or cleared", lambda optimizer: optimizer.state.clear()),
        ("read", lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()),
    ],
)
def test_moments_that_the_loop_loads_clears_or_reads_are_one_line(
    workers: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str], done: str, change: Callable[[Optimizer], None]
) -> None:
    """The server has them, and would go on with its own."""

    def train(worker: int) -> None:
        model = model_of()
        optimizer = Adam(model.parameters(), lr=0.01)
        with pytest.raises(SystemExit, match="2"), HybridAsync(model, optimizer, run_dir=str(tmp_path / "own")):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
                change(optimizer)
        optimizer.state.clear()  # after the block it is the script's own

    workers(1, gradient_main.build).run(train)
    assert f"error: the state of the optimizer was {done} during the run" in capfd.readouterr().err


@pytest.mark.parametrize("of_trainer", [False, True])
def test_an_optimizer_that_is_saved_without_its_moments_is_named_once(
    workers: Start, capfd: pytest.CaptureFixture[str], of_trainer: bool
) -> None:
    """A checkpoint of the Trainer has the server's state."""

    def train(worker: int) -> None:
        model = model_of()
        optimizer = Adam(model.parameters(), lr=0.01)
        training = HybridAsync(model, optimizer, updates_per_step=1)
        training.of_trainer = of_trainer
        with training:
            loss_of(model, 0, 0).backward()
            optimizer.step()
            assert not optimizer.state_dict()["state"]
        assert not optimizer.state_dict()["state"]

    workers(1, gradient_main.build).run(train)
    assert capfd.readouterr().err.count("warning: Adam.state_dict() has no moments") == (not of_trainer)


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
        model, factor = model_of(), [1.0]
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = Outside(optimizer) if kind == "a class" else LambdaLR(optimizer, lambda step: factor[0])
        make = HybridAsync if method == "hybrid" else AsyncLocalSGD
        with pytest.raises(SystemExit, match="2"), make(model, optimizer, scheduler, total_steps=STEPS):
            for step in range(STEPS):
                if step == 2:
                    factor[0] = scheduler.factor = 0.1  # type: ignore[attr-defined]
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
                assert step < 3
                if "not" not in kind and (method == "hybrid" or step == 2):
                    scheduler.step()

    workers(1, local_sgd_main.build if method == "local" else gradient_main.build).run(train)
    stepped = method == "local" and kind == "a class"
    said = "follows the progress of the run" if stepped else "which the run takes"
    assert said in capfd.readouterr().err


WRONG: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any], str]] = {
    "another optimizer": (lambda model: torch.optim.RMSprop(model.parameters()), {}, "RMSprop"),
    "a name that is misspelt": (
        OPTIMIZERS["Adam"],
        {"total_step": 3},
        "total_step; known are barrier, compress, look_ahead, seed, total_steps",
    ),
    "a bad value": (OPTIMIZERS["Adam"], {"updates_per_step": 0}, "updates_per_step: Input should be greater"),
    "a server's bad value": (OPTIMIZERS["Adam"], {"snapshot_seconds": -1}, "snapshot_seconds: Input should be"),
    "clipping below 0": (
        OPTIMIZERS["Adam"],
        {"clip_norm": -1.0},
        "clip_norm is -1.0: it must be a number of at least 0",
    ),
    "shards": (OPTIMIZERS["Adam"], {"shards": 3}, "shards is of no use"),
    "another method": (OPTIMIZERS["Adam"], {"method": "local_sgd"}, "method: Input should be 'hybrid_async'"),
    "a parameter of another model": (
        lambda model: Adam([*model.parameters(), nn.Parameter(torch.ones(1))]),
        {},
        "1 par",
    ),
    "no parameter": (lambda model: Adam(nn.Linear(1, 1).parameters()), {}, "2 parameters that are not the model's"),
}


@pytest.mark.parametrize(("make", "options", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_line_before_anything_starts(
    make: Any, options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        HybridAsync(model := model_of(), make(model), **options)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and said in lines[0]


SCHEDULES_REFUSED: dict[str, tuple[Callable[[Optimizer], Any], dict[str, Any], str]] = {
    "without an end": (SCHEDULERS["cosine"], {}, "total_steps="),
    "a plateau": (torch.optim.lr_scheduler.ReduceLROnPlateau, {"total_steps": 3}, "follows a loss"),
    "betas that change": (lambda o: OneCycleLR(o, 0.1, total_steps=9), {"total_steps": 3}, "cycle_momentum=False"),
    "a rate without end": (
        lambda o: LambdaLR(o, lambda step: float("inf") if step == 2 else 1.0),
        {"total_steps": 3},
        "gives the learning rates [inf] after 2 steps",
    ),
    "too many rates": (SCHEDULERS["lambda"], {"total_steps": 1_000_000}, "more than 400000"),
}


@pytest.mark.parametrize(("schedule", "options", "said"), SCHEDULES_REFUSED.values(), ids=SCHEDULES_REFUSED.keys())
def test_a_scheduler_that_cannot_be_followed_is_one_line(
    schedule: Any, options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of()
    optimizer = Adam(model.parameters())
    scheduler = schedule(optimizer)
    with pytest.raises(SystemExit):
        HybridAsync(model, optimizer, scheduler=scheduler, **options)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(("name", "value"), [("lr", 0.0), ("weight_decay", 5.0), ("betas", (0.5, 0.5)), ("params", [])])
def test_an_option_that_the_script_changes_beside_its_scheduler_is_one_line(
    workers: Start, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    """The server would go on with the one before."""

    def train(worker: int) -> None:
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=0.01)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        with pytest.raises(SystemExit), HybridAsync(model, optimizer, scheduler=scheduler, total_steps=STEPS):
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
                scheduler.step()
                assert step < 2
                if step == 1:
                    optimizer.param_groups[0][name] = value

    workers(1, gradient_main.build).run(train)
    said = "param_groups[0] of" if name == "params" else f'param_groups[0]["{name}"] of'
    assert f"{said} the optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_that_is_stepped_before_its_optimizer_is_named_once(
    workers: Start, capsys: pytest.CaptureFixture[str], early: bool
) -> None:
    def train(worker: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.01)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        with HybridAsync(model, optimizer, scheduler=scheduler, total_steps=STEPS):
            for step in range(3):
                if early:
                    scheduler.step()
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
                if not early:
                    scheduler.step()

    workers(1, gradient_main.build).run(train)
    assert capsys.readouterr().err.count("was stepped before the first optimizer.step()") == early


def test_what_is_outside_of_the_block_or_no_state_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    training = HybridAsync(model := model_of(), Adam(model.parameters()))
    for use, said in [
        (training.pull, "HybridAsync is used outside of its with block"),
        (lambda: training.finished, "HybridAsync is used outside of its with block"),
        (lambda: training.load_state_dict({"model": {}, "async": {}}), "give what state_dict() has returned"),
    ]:
        with pytest.raises(SystemExit):
            use()
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_a_learning_rate_that_would_be_ignored_is_one_line(capsys: pytest.CaptureFixture[str], workers: Start) -> None:
    """A scheduler that was not given, and a rate that the loop sets."""
    model = model_of()
    optimizer = Adam(model.parameters())
    CosineAnnealingLR(optimizer, 3)
    with pytest.raises(SystemExit):
        HybridAsync(model, optimizer)
    assert "give a scheduler of torch as scheduler=" in capsys.readouterr().err

    def train(worker: int) -> None:
        optimizer = Adam(model.parameters())
        with pytest.raises(SystemExit), HybridAsync(model, optimizer, updates_per_step=1):
            optimizer.param_groups[0]["lr"] = 0.5
            loss_of(model, 0, 0).backward()
            optimizer.step()

    workers(1, gradient_main.build).run(train)
    assert 'param_groups[0]["lr"] of the optimizer was 0.001 and is 0.5 now' in capsys.readouterr().err
