"""``HybridAsync`` round an ordinary optimizer, against plain synchronous training by the mean gradient."""

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.pytorch.micro_batches import BackwardPasses
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.rounds.shares import Shares
from fairseq_async.worker.loop import WorkerLoop
from tests.helpers.run_files import events
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


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * worker + step))
    outputs = model(inputs.to(next(model.parameters()).dtype))
    return nn.functional.mse_loss(outputs, inputs.sum(1, keepdim=True).sin().to(outputs.dtype))


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
    "Adagrad": lambda model: torch.optim.Adagrad(decayed_and_not(model), lr=0.05),
    "NAdam": lambda model: torch.optim.NAdam(decayed_and_not(model), lr=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda model: torch.optim.Adafactor(decayed_and_not(model), lr=0.05, eps=(None, 1e-2)),
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
            ended = flat(model)
            optimizer.step()  # after the end, which changes nothing
            assert torch.equal(flat(model), ended)
        assert not optimizer.state and step == STEPS
        return ended

    return team.run(train)


CASES: dict[str, tuple[str, Any]] = {name: (name, None) for name in OPTIMIZERS}
CASES |= {name: ("AdamW of groups", schedule) for name, schedule in SCHEDULERS.items()}


@pytest.mark.parametrize(("kind", "schedule"), CASES.values(), ids=CASES.keys())
def test_with_a_barrier_it_is_synchronous_training_to_the_bit(workers: Start, kind: str, schedule: Any) -> None:
    """With the rates of a scheduler by the server's own steps."""
    optimizer = OPTIMIZERS[kind](model := model_of())
    expected = synchronous(model, optimizer, 2, schedule and schedule(optimizer))
    for ended in asynchronous(workers(2, gradient_main.build), OPTIMIZERS[kind], schedule):
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


def with_scheduler(model: nn.Module) -> Optimizer:
    optimizer = Adam(model.parameters())
    CosineAnnealingLR(optimizer, 3)
    return optimizer


ADAM, SCHEDULED = OPTIMIZERS["Adam"], {"total_steps": 3}
WRONG: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any], str]] = {
    "another optimizer": (lambda model: torch.optim.Rprop(model.parameters()), {}, "Rprop"),
    "a name that is misspelt": (
        ADAM,
        {"total_step": 3},
        "total_step; known are barrier, compress, look_ahead, micro_batches, seed",
    ),
    "a bad value": (ADAM, {"updates_per_step": 0}, "updates_per_step: Input should be greater"),
    "a server's bad value": (ADAM, {"snapshot_seconds": -1}, "snapshot_seconds: Input should be"),
    "clipping below 0": (ADAM, {"clip_norm": -1.0}, "clip_norm is -1.0: it must be a number of at least 0"),
    "shards": (ADAM, {"shards": 3}, "shards is of no use"),
    "another method": (ADAM, {"method": "local_sgd"}, "method: Input should be 'hybrid_async'"),
    "a parameter of another model": (
        lambda model: Adam([*model.parameters(), nn.Parameter(torch.ones(1))]),
        {},
        "1 par",
    ),
    "a scheduler that is not given": (with_scheduler, {}, "give a scheduler of torch as scheduler="),
    "a schedule without an end": (ADAM, {"scheduler": SCHEDULERS["cosine"]}, "total_steps="),
    "a plateau": (ADAM, SCHEDULED | {"scheduler": ReduceLROnPlateau}, "follows a loss"),
    "betas that change": (ADAM, SCHEDULED | {"scheduler": lambda of: OneCycleLR(of, 0.1, 9)}, "cycle_momentum=False"),
    "a rate without end": (
        ADAM,
        SCHEDULED | {"scheduler": lambda of: LambdaLR(of, lambda step: math.inf if step == 2 else 1.0)},
        "gives the learning rates [inf] after 2 steps",
    ),
    "too many rates": (ADAM, {"scheduler": SCHEDULERS["lambda"], "total_steps": 1_000_000}, "more than 400000"),
}


@pytest.mark.parametrize(("make", "options", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_line_before_anything_starts(
    make: Any, options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a schedule that cannot be followed."""
    optimizer = make(model := model_of())
    scheduler = {"scheduler": options["scheduler"](optimizer)} if "scheduler" in options else {}
    with pytest.raises(SystemExit, match="2"):
        HybridAsync(model, optimizer, **options | scheduler)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


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


def accumulating(team: ThreadWorkers, taken: list[list[int]], **options: Any) -> list[Tensor]:
    """Where each worker ends; ``taken`` gets the number of micro-batches of each of its steps."""

    def train(worker: int) -> Tensor:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        with HybridAsync(model, optimizer, barrier=True, micro_batches=4, total_steps=STEPS, **options) as training:
            number = 0
            while not training.finished:
                (loss_of(model, worker, number) / training.micro_batches).backward()
                number += 1
                if training.step_is_due:
                    taken[worker].append(training.micro_batches)
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model)

    return team.run(train)


def of_steps(taken: list[list[int]]) -> Tensor:
    """Where synchronous training in float64 ends that takes the same micro-batches in the same steps."""
    model, drawn = model_of().double(), [0, 0]
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in zip(*taken, strict=True):
        optimizer.zero_grad()
        for worker, count in enumerate(step):
            for number in range(drawn[worker], drawn[worker] + count):
                (loss_of(model, worker, number) / sum(step)).backward()
            drawn[worker] += count
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("shares", "later"), [("auto", [[6, 2]]), ("equal", [[4, 4]])])
def test_a_step_of_shares_is_synchronous_with_the_same_micro_batches(
    workers: Start, monkeypatch: pytest.MonkeyPatch, shares: str, later: list[list[int]]
) -> None:
    """The server is told what it would measure if the second worker took three times as long."""
    monkeypatch.setattr(Shares, "divide", lambda self, *_: setattr(self, "_given", {0: 6, 1: 2}))
    taken: list[list[int]] = [[], []]
    ended = accumulating(workers(2, gradient_main.build), taken, shares=shares)
    assert [list(step) for step in zip(*taken, strict=True)] == [[4, 4]] + later * (STEPS - 1)
    for own in ended:
        torch.testing.assert_close(own.double(), of_steps(taken), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shares", ["auto", "equal"])
def test_batches_by_number_make_the_run_the_synchronous_one_whatever_the_speeds(
    workers: Start, monkeypatch: pytest.MonkeyPatch, shares: str
) -> None:
    monkeypatch.setattr(Shares, "divide", lambda self, *_: setattr(self, "_given", {0: 6, 1: 2}))
    taken: list[int] = []

    def train(_: int) -> Tensor:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"barrier": True, "micro_batches": 4, "shares": shares, "total_steps": STEPS}
        with HybridAsync(model, optimizer, **options) as worker:
            while not worker.finished:
                for number in worker.batch_numbers:
                    (loss_of(model, 0, number) / worker.micro_batches).backward()
                    taken.append(number)
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    ended = workers(2, gradient_main.build).run(train)
    assert sorted(taken) == list(range(8 * STEPS))
    for own in ended:
        torch.testing.assert_close(own.double(), of_steps([[8] * STEPS]), rtol=1e-6, atol=1e-6)


def test_a_step_before_it_is_due_is_one_line(workers: Start, capfd: pytest.CaptureFixture[str]) -> None:
    def train(worker: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.05)
        with pytest.raises(SystemExit), HybridAsync(model, optimizer, micro_batches=4):
            loss_of(model, 0, 0).backward()
            optimizer.step()

    workers(1, gradient_main.build).run(train)
    assert "after backward of 1 micro-batches, in a step that has 4" in capfd.readouterr().err


def test_after_the_block_the_optimizer_is_the_scripts_again_and_keeps_what_it_is_given(workers: Start) -> None:
    def train(worker: int) -> None:
        model = model_of()
        optimizer = Adam(model.parameters())
        with HybridAsync(model, optimizer, total_steps=1) as run:
            loss_of(model, worker, 0).backward()
            optimizer.step()
            run.leave()
            optimizer.state[model[0].bias]["step"] = torch.tensor(7.0)
        assert list(optimizer.state.values()) == [{"step": 7.0}], "as where a script loads the best checkpoint"
        optimizer.state.clear()
        before = flat(model)
        optimizer.step()
        assert not torch.equal(flat(model), before) and optimizer.state[model[0].bias]["step"] == 1

    workers(1, gradient_main.build).run(train)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        (HybridAsync, {}, [5.0, None, 7.0]),
        (AsyncLocalSGD, {"local_steps": 1}, [5.0, None, 7.0]),
        (AsyncLocalSGD, {"local_steps": 3}, [6.0]),  # the mean of those that it has
    ],
)
def test_a_loss_is_that_of_the_step_before_which_it_was_set(
    workers: Start, tmp_path: Path, method: Any, options: dict[str, int], expected: list[float | None]
) -> None:
    def train(worker: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1)
        loss = torch.tensor(0.0)  # one memory for all losses, as with CUDA graphs
        with method(model, optimizer, **options) as run:
            for step in range(3):
                loss_of(model, worker, step).backward()
                if step != 1:
                    run.loss = loss.fill_(5.0 + step)
                optimizer.step()

    workers(1, gradient_main.build if method is HybridAsync else local_sgd_main.build).run(train)
    assert [event.get("loss") for event in events(tmp_path / "run-0")] == expected


def test_micro_batches_are_counted_in_their_own_block() -> None:
    """Not with those of a block that an exception has ended amid a step."""
    passes, parameter, other = BackwardPasses(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    for count in (1, 2):
        handles = passes.add_hooks([("w", parameter), ("of some batches", other)])
        other.sum().backward()
        for _ in range(count):
            parameter.sum().backward()
        assert passes.count == count
        for each in handles:
            each.remove()
    passes.check(2)
    assert passes.count == 0


@pytest.mark.parametrize(("make", "build"), [(AsyncLocalSGD, local_sgd_main.build), (HybridAsync, gradient_main.build)])
def test_a_worker_that_is_to_be_slower_waits_once_in_each_step(
    workers: Start, monkeypatch: pytest.MonkeyPatch, make: Any, build: Any
) -> None:
    waited: list[float] = []

    def wait(loop: WorkerLoop) -> float:
        waited.append(1.0)
        return 0.5

    monkeypatch.setattr(WorkerLoop, "slowed_down", wait)

    def train(worker: int) -> int:
        model, steps = model_of(), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        with make(model, optimizer, total_steps=4) as training:
            while not training.finished:
                optimizer.zero_grad()
                loss_of(model, worker, steps).backward()
                optimizer.step()
                steps += 1
        return steps

    assert workers(1, build).run(train) == [4] and len(waited) == 4


def test_a_scripts_own_hook_after_a_step_finds_the_gradients(workers: Start) -> None:
    def train(worker: int) -> list[bool]:
        model, found = model_of(), list[bool]()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: found.append(all(p.grad is not None for p in model.parameters())))
        with HybridAsync(model, optimizer, total_steps=2) as training:
            while not training.finished:
                optimizer.zero_grad()
                loss_of(model, worker, 0).backward()
                optimizer.step()
        return found

    assert workers(1, gradient_main.build).run(train) == [[True, True]]
