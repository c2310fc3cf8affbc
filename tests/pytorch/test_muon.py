"""Muon in both methods, against the same plain loop, and against its formulas in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.torch import AsyncLocalSGD, HybridAsync, MuonAdamW, muon_groups
from tests.helpers.references import Muon64
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
Make = Callable[[nn.Module], list[Optimizer]]
STEPS, LOCAL_STEPS, RATE = 6, 3, 0.02
DILOCO: dict[str, Any] = {"outer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0, "local_steps": LOCAL_STEPS}
# torch iterates in bfloat16, with 8 bits. Where a step begins at parameters whose last bit differs, a number on the
# way may round to the other neighbour, 2^-8 away. Against float64 every number is rounded otherwise.
ROUNDED, FLOAT64 = 1e-3, 0.03


def network() -> nn.Sequential:
    model, generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(8, 3, generator=generator).to(next(model.parameters()))
    return (model(inputs) - torch.cat([inputs.sin(), inputs[:, :1]], 1)).square().mean()


def both(model: nn.Module) -> list[Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [Muon(matrices, lr=RATE, adjust_lr_fn="match_rms_adamw"), AdamW(rest, lr=RATE, weight_decay=0.1)]


def one(model: nn.Module) -> list[Optimizer]:
    return [MuonAdamW(muon_groups(model.named_parameters()), lr=RATE, adjust_lr_fn="match_rms_adamw")]


def matrices_alone(model: nn.Module) -> list[Optimizer]:
    """The biases are trained by nobody."""
    for each in model.parameters():
        each.requires_grad = each.dim() == 2
    return [Muon([p for p in model.parameters() if p.requires_grad], lr=RATE, adjust_lr_fn="match_rms_adamw")]


def take_step(model: nn.Module, optimizers: list[Optimizer], worker: int, step: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, worker, step).backward()
    for optimizer in optimizers:
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in model.parameters()])


def distance(found: Tensor, expected: Tensor) -> float:
    """As a part of how far training has gone."""
    return float((found - expected).norm() / (expected - flat(network())).norm())


def train(make: Make, worker: int, method: Any, **options: Any) -> Tensor:
    model = network()
    optimizers = make(model)
    with method(model, optimizers if len(optimizers) > 1 else optimizers[0], total_steps=STEPS, **options) as training:
        step = 0
        while not training.finished:
            take_step(model, optimizers, worker, step)
            step += 1
    assert step == STEPS
    return flat(model)


def plain(make: Make) -> Tensor:
    model = network()
    optimizers = make(model)
    for step in range(STEPS):
        take_step(model, optimizers, 0, step)
    return flat(model)


MAKERS: list[Make] = [both, one, matrices_alone]


@pytest.mark.parametrize("make", MAKERS)
def test_local_steps_of_one_worker_are_the_plain_loop(workers: Start, make: Make) -> None:
    """The server subtracts how far the worker has gone, which rounds the last bit."""
    (ended,) = workers(1, local_sgd_main.build).run(lambda worker: train(make, worker, AsyncLocalSGD, **DILOCO))
    assert distance(ended, plain(make)) <= ROUNDED


@pytest.mark.parametrize("make", MAKERS)
def test_a_gradient_of_one_worker_is_the_plain_loop_to_the_bit(workers: Start, make: Make) -> None:
    (ended,) = workers(1, gradient_main.build).run(lambda worker: train(make, worker, HybridAsync, barrier=True))
    assert torch.equal(ended, plain(make))


class Double:
    """Muon64 for the matrices of a model in float64, and torch's AdamW for the rest."""

    def __init__(self, start: nn.Module) -> None:
        self.model = copy.deepcopy(start).double()
        self.muon = Muon64(RATE, 0.1, lambda rows, columns: 0.2 * max(rows, columns) ** 0.5)
        self.adamw = AdamW([p for p in self.model.parameters() if p.dim() == 1], lr=RATE, weight_decay=0.1)

    def step(self, gradients: tuple[Tensor, ...]) -> None:
        for number, (parameter, gradient) in enumerate(zip(self.model.parameters(), gradients, strict=True)):
            parameter.grad = gradient
            if parameter.dim() == 2:
                parameter.data = self.muon.stepped(number, parameter.detach(), gradient)
        self.adamw.step()


def gradients(model: nn.Module, worker: int, step: int) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(model, worker, step), list(model.parameters()))


@pytest.mark.parametrize("make", [both, one])
def test_local_steps_of_two_workers_are_the_formulas_in_float64(workers: Start, make: Make) -> None:
    """Each keeps its own moments; both begin each round at the mean of where they were."""
    pair = [Double(network()), Double(network())]
    for step in range(STEPS):
        for worker, each in enumerate(pair):
            each.step(gradients(each.model, worker, step))
        if (step + 1) % LOCAL_STEPS == 0:
            mean = [torch.stack(own).mean(0) for own in zip(*(each.model.parameters() for each in pair), strict=True)]
            for each in pair:
                for parameter, value in zip(each.model.parameters(), mean, strict=True):
                    parameter.data = value.detach().clone()
    ended = workers(2, local_sgd_main.build).run(lambda worker: train(make, worker, AsyncLocalSGD, **DILOCO))
    assert torch.equal(*ended) and distance(ended[0], flat(pair[0].model)) < FLOAT64


@pytest.mark.parametrize("make", [both, one])
def test_the_servers_steps_by_two_workers_are_the_formulas_in_float64(workers: Start, make: Make) -> None:
    """Each step is by the mean gradient."""
    double = Double(network())
    for step in range(STEPS):
        each = [gradients(double.model, worker, step) for worker in (0, 1)]
        double.step(tuple(torch.stack(own).mean(0) for own in zip(*each, strict=True)))
    ended = workers(2, gradient_main.build).run(lambda worker: train(make, worker, HybridAsync, barrier=True))
    assert torch.equal(*ended) and distance(ended[0], flat(double.model)) < FLOAT64


@pytest.mark.parametrize("make", [both, one])
def test_a_run_goes_on_from_an_ordinary_one_and_from_its_own_checkpoint_to_the_bit(workers: Start, make: Make) -> None:
    """Momentum, both moments and AdamW's step count go to the server, and from one server to the next."""
    before = 2

    def go_on(worker: int, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        model = network()
        optimizers = make(model)
        first = 0 if state else before
        for step in range(first):
            take_step(model, optimizers, 0, step)
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        training = HybridAsync(model, given, total_steps=STEPS - before)
        training.load_state_dict(state)
        with training:
            step = before + round(training.progress)
            while not training.finished and (state or step < 4):
                take_step(model, optimizers, 0, step)
                step += 1
            return flat(model), copy.deepcopy(training.state_dict())

    ((_, state),) = workers(1, gradient_main.build).run(lambda worker: go_on(worker, {}))
    ((ended, _),) = workers(1, gradient_main.build).run(lambda worker: go_on(worker, state))
    assert torch.equal(ended, plain(make))
