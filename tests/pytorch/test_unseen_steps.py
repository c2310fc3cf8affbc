"""Training that a run does not see ends the worker with one line; what an ordinary script does goes through."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.pytorch.training import AsyncTraining
from fairseq_async.server.plan import whole_steps
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
STEPS = 12
AS_IT_IS: dict[str, Any] = {
    "outer": "sgd",
    "outer_lr": 1.0,
    "local_steps": 3,
}  # one worker's steps are taken as they are


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return made


def backward(model: nn.Module, step: int, worker: int = 0) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * worker + step))
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin()).backward()


def flat(*models: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for model in models for parameter in model.parameters()])


def hybrid(model: nn.Module, optimizer: Optimizer, **options: Any) -> AsyncTraining:
    return HybridAsync(model, optimizer, total_steps=STEPS, **options)


def local(model: nn.Module, optimizer: Optimizer, **options: Any) -> AsyncTraining:
    return AsyncLocalSGD(model, optimizer, total_steps=STEPS, **AS_IT_IS, **options)


METHODS = {"hybrid": (hybrid, gradient_main.build), "local SGD": (local, local_sgd_main.build)}


class Sharpness(Optimizer):
    """SAM as it is commonly written: an optimizer whose step calls another one's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class SlowWeights:
    """Lookahead: no optimizer of torch's, and moves the weights after another one's step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.calls = inner, 0
        self.tensors = [each for group in inner.param_groups for each in group["params"]]
        self.slow = [each.detach().clone() for each in self.tensors]

    def step(self) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % 4 == 0:
            for fast, slow in zip(self.tensors, self.slow, strict=True):
                fast.data.copy_(slow.lerp_(fast.data, 0.5))


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad


def anew(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    return SGD(model.parameters(), lr=0.1).step


def later(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    other, calls = SGD(model.parameters(), lr=0.1), count()
    return lambda: (optimizer if next(calls) < 3 else other).step()


def wrapped(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    return Sharpness(optimizer).step


def in_backward(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    for parameter in model.parameters():
        own = SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]
    return lambda: None


UNSEEN: dict[str, tuple[Callable[..., Callable[[], object]], str]] = {
    "an optimizer made anew": (anew, "SGD steps 0.weight, and is not the optimizer"),
    "another one after three steps": (later, "SGD steps 0.weight, and is not the optimizer"),
    "a wrapper that the run was not given": (wrapped, "Sharpness steps 0.weight"),
    "optimizers in backward hooks": (in_backward, "SGD steps "),
    "by hand": (lambda model, _: lambda: by_hand(model), "0.weight is trained, and no step"),
    "by hand, other data": (lambda model, _: lambda: through_data(model), "0.weight is trained, and no step"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", UNSEEN)
def test_training_that_the_run_does_not_see_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], case: str, method: str
) -> None:
    (make, build), (steps, said) = METHODS[method], UNSEEN[case]

    def train(worker: int) -> int:
        model, taken = net(), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit), make(model, optimizer):
            step = steps(model, optimizer)
            for taken in range(STEPS):
                model.zero_grad()
                backward(model, taken)
                step()
        return taken

    (taken,) = workers(1, build).run(train)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert said in line and taken < 9


def undivided(model: nn.Module, step: int, worker: int) -> None:
    backward(model, step)


def through_a_module(model: nn.Module, step: int, worker: int) -> None:
    assert isinstance(model, nn.Sequential)
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    model[2](model[0](inputs).tanh()).sum().backward()


def constant(model: nn.Module, step: int, worker: int) -> None:
    model(torch.ones(4, 5)).sum().backward()


def within_vmap(model: nn.Module, step: int, worker: int) -> None:
    """A tensor that nobody can read; then the worker's own data."""
    torch.func.vmap(model)(torch.ones(4, 5))
    backward(model, step, worker)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("compute", "is_said"),
    [(undivided, True), (through_a_module, True), (backward, False), (constant, False), (within_vmap, False)],
)
def test_two_workers_that_begin_with_the_same_batches_are_named(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, compute: Callable[..., None], is_said: bool
) -> None:
    """Whatever their dropout; data whose rows are all equal shows nothing."""
    make, build = METHODS[method]

    def train(worker: int) -> int:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01)
        with make(model, optimizer):
            for step in range(6):
                model.zero_grad()
                compute(model, step, worker)
                optimizer.step()
        return sum(len(module._forward_hooks) for module in model.modules())

    left = workers(2, build).run(train)
    said = "warning: workers 0 and 1 began with the same batches: give each its own part" in capfd.readouterr().err
    assert said == is_said and left == [0, 0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_copy_that_is_trained_in_the_models_place_is_named(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, in_turn: bool
) -> None:
    """But not a network of the same shapes that is trained beside it."""
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with make(model, optimizer):
            other = copy.deepcopy(model)
            others = SGD(other.parameters(), lr=0.1)
            for number in range(STEPS):
                for trained, of_it in ((model, optimizer), (other, others)) if in_turn else ((other, others),):
                    trained.zero_grad()
                    backward(trained, number)
                    of_it.step()

    workers(1, build).run(train)
    assert capfd.readouterr().err.count("warning: SGD steps parameters of the same shapes as the run's") == (
        not in_turn
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_too_short_to_be_looked_at_is_found_at_its_end(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        with pytest.raises(SystemExit), make(model, SGD(model.parameters(), lr=0.1)):
            backward(model, 0)
            by_hand(model)

    workers(1, build).run(train)
    assert "error: 0.weight " in capfd.readouterr().err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raised", [nullcontext(), pytest.raises(KeyError)], ids=["whole", "with an exception"])
def test_a_change_while_the_model_has_the_servers_parameters_is_taken_or_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], method: str, raised: AbstractContextManager[object]
) -> None:
    """In the middle of a round; weights that are put back are no change. One before an exception stays, as in torch."""
    make, build = METHODS[method]

    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)

        def steps(count: int) -> None:
            for number in range(count):
                model.zero_grad()
                backward(model, number)
                optimizer.step()

        with make(model, optimizer) as training:
            steps(4)
            own, weight = flat(model), model.get_parameter("0.weight")
            with training.server_parameters(), torch.no_grad():
                weight.add_(1.0)
                training.take_server_parameters()  # once more, as for a save after an evaluation
            assert torch.equal(flat(model), own)
            with raised, training.server_parameters(), torch.no_grad():
                servers = weight.clone()
                weight.clamp_(-0.1, 0.1)
                if not isinstance(raised, nullcontext):
                    raise KeyError
            wanted = torch.where(servers.abs() > 0.1, servers.clamp(-0.1, 0.1), own[:40].view(8, 5))
            assert torch.equal(weight, wanted) and torch.equal(flat(model)[40:], own[40:])
            training.pull()
            torch.testing.assert_close(weight.detach(), wanted)  # the server has it

    if method == "local SGD":
        workers(1, build).run(train)
        return
    workers(1, build).run(lambda worker: pytest.raises(SystemExit, train, worker))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert "0.weight is not as this worker took it" in line


WRAPPERS: dict[str, Callable[[Optimizer], tuple[Any, Optimizer]]] = {
    "a wrapper that the run was given": lambda inner: (each := Sharpness(inner), each),
    "one that is no optimizer, round the run's": lambda inner: (SlowWeights(inner), inner),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_local_sgd_takes_what_a_wrapper_does(workers: Start, case: str) -> None:
    def loop(model: nn.Module, step: Callable[[], object]) -> Tensor:
        for number in range(STEPS):
            model.zero_grad()
            backward(model, number)
            step()
        return flat(model)

    def train(worker: int) -> Tensor:
        model = net()
        stepped, given = WRAPPERS[case](SGD(model.parameters(), lr=0.1, momentum=0.9))
        with local(model, given) as training:
            loop(model, stepped.step)
            assert training.progress == STEPS
        return flat(model)

    (ended,) = workers(1, local_sgd_main.build).run(train)
    plain = net()
    torch.testing.assert_close(
        ended, loop(plain, WRAPPERS[case](SGD(plain.parameters(), lr=0.1, momentum=0.9))[0].step)
    )


def game(workers: int) -> tuple[list[nn.Module], list[Optimizer], Callable[[int, int], None]]:
    """A generator and a discriminator, which steps twice in each round."""
    models = [nn.Sequential(nn.Linear(5, 4)), net()]
    models[0].load_state_dict({"0.weight": torch.eye(4, 5) / 2, "0.bias": torch.zeros(4)})
    models[1][0] = nn.Linear(4, 8)  # type: ignore[operator]
    models[1].load_state_dict(
        {name: value[:, :4] if name == "0.weight" else value for name, value in net().state_dict().items()}
    )
    optimizers: list[Optimizer] = [Adam(models[0].parameters(), lr=0.01), SGD(models[1].parameters(), lr=0.1)]

    def round_of(step: int, worker: int) -> None:
        draw = torch.Generator().manual_seed(100 * worker + step)
        for _ in range(2):
            optimizers[1].zero_grad()
            made = models[0](torch.randn(4, 5, generator=draw)).detach()
            (
                models[1](made).square().mean() + (models[1](torch.randn(4, 4, generator=draw)) - 1).square().mean()
            ).backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        (models[1](models[0](torch.randn(4, 5, generator=draw))) - 1).square().mean().backward()
        optimizers[0].step()

    return models, optimizers, round_of


def divided(workers: int) -> tuple[list[nn.Module], list[Optimizer], Callable[[int, int], None]]:
    """Muon for matrices, AdamW for the rest, which step after one backward pass."""
    model = net()
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizers: list[Optimizer] = [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)]

    def round_of(step: int, worker: int) -> None:
        model.zero_grad()
        backward(model, step, worker)
        for optimizer in optimizers:
            optimizer.step()

    return [model], optimizers, round_of


@pytest.mark.parametrize("make", [game, divided])
@pytest.mark.parametrize("count", [1, 2])
def test_several_optimizers_take_their_local_steps_together(workers: Start, make: Any, count: int) -> None:
    """One worker is the plain loop; two end with the same parameters, of all optimizers."""

    def train(worker: int) -> Tensor:
        models, optimizers, round_of = make(count)
        with AsyncLocalSGD(models, optimizers, total_steps=STEPS, **AS_IT_IS) as training:
            step = 0
            while not training.finished:
                round_of(step, worker)
                step += 1
            assert count > 1 or step == training.progress == STEPS
        return flat(*models)

    ended = workers(count, local_sgd_main.build).run(train)
    if count == 1:
        models, _, round_of = make(1)
        for step in range(STEPS):
            round_of(step, 0)
        torch.testing.assert_close(ended[0], flat(*models))
    else:
        assert torch.equal(ended[0], ended[1])


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


def by_the_loop(optimizer: Optimizer) -> Callable[[int], object]:
    return lambda step: optimizer.param_groups[0].update(lr=0.1 / (1 + step))


OWN_SCHEDULES: dict[str, tuple[Callable[[Optimizer], Callable[[int], object]], int]] = {  # and the last step
    "a scheduler": (lambda optimizer: (each := CosineAnnealingLR(optimizer, STEPS)) and (lambda _: each.step()), 0),
    "a plateau": (plateau, 1),
    "a rate of the loop": (by_the_loop, 1),
}


@pytest.mark.parametrize("case", [*OWN_SCHEDULES, "given"])
def test_a_schedule_that_is_stepped_by_hand_is_one_line(
    workers: Start, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    def train(worker: int) -> None:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        given = CosineAnnealingLR(optimizer, STEPS) if case == "given" else None
        make, last = OWN_SCHEDULES.get(case, (lambda _: lambda _: given.step(), 0))  # type: ignore[union-attr]
        after_step = make(optimizer)
        with pytest.raises(SystemExit):
            with AsyncLocalSGD(model, optimizer, given, total_steps=STEPS, **AS_IT_IS):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    backward(model, step, worker)
                    optimizer.step()
                    assert step <= last
                    after_step(step)

    workers(2, local_sgd_main.build).run(train)
    said = "follows the progress of the run" if case == "given" else "give it as scheduler="
    assert capfd.readouterr().err.count(said) == 2


def test_a_rate_that_the_loop_takes_from_the_progress_of_the_run_is_taken(workers: Start) -> None:
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

    assert max(map(len, workers(2, local_sgd_main.build).run(train))) > 2
