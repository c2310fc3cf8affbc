"""Parameters without a gradient under ``HybridAsync``, against torch's own loop, which leaves them alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fairseq_async.pytorch import HybridAsync
from fairseq_async.server.programs import gradient_main
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.02, weight_decay=0.3),
    "Adam": lambda model: Adam(model.parameters(), lr=0.02, weight_decay=0.3),
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.3),
}
USED = [
    (0, 1),
    (0, 0),
    (2, 2),
    (2, 0),
    (1, 1),
    (0, 0),
    (1, 2),
    (2, 2),
]  # each worker's adapter in each step; 3 is unused


class Switched(nn.Module):
    """A body, and adapters of which a batch uses one; their parameters lie beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.adapters = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)

    def loss(self, worker: int, step: int) -> Tensor:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * worker + step))
        hidden = self.body(inputs).tanh()
        return nn.functional.mse_loss(self.adapters[USED[step][worker]](hidden), inputs.sum(1, keepdim=True).sin())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_zeros_that_the_loop_makes_of_gradients_count(workers: Start) -> None:
    """And what a loop accumulates over steps, as it does where it does not clear the gradients."""

    def train(model: Switched, optimizer: Optimizer) -> Tensor:
        for step in range(len(USED)):
            if step % 3:
                optimizer.zero_grad(set_to_none=False)
            model.loss(0, step).backward()
            optimizer.step()
        return flat(model)

    check_one_worker_is_plain(workers, train)


def test_a_layer_that_is_frozen_in_the_block_trains_from_when_it_is_unfrozen(workers: Start) -> None:
    def train(model: Switched, optimizer: Optimizer) -> Tensor:
        for step in range(len(USED)):
            model.body.requires_grad_(step > 3)
            optimizer.zero_grad()
            model.loss(0, step).backward()
            optimizer.step()
        return flat(model)

    check_one_worker_is_plain(workers, train)


def check_one_worker_is_plain(workers: Start, train: Callable[[Switched, Optimizer], Tensor]) -> None:
    """To the bit; and the loop is not the plain one of these tests, or it would show nothing."""

    def asynchronous(worker: int) -> Tensor:
        model = Switched()
        optimizer = OPTIMIZERS["AdamW"](model)
        with HybridAsync(model, optimizer, updates_per_step=1):
            return train(model, optimizer)

    model = Switched()
    expected = train(model, OPTIMIZERS["AdamW"](model))
    assert torch.equal(*workers(1, gradient_main.build).run(asynchronous), expected)
    assert not torch.equal(expected, plain(OPTIMIZERS["AdamW"], 1))


def plain(make: Callable[[nn.Module], Optimizer], workers: int) -> Tensor:
    """The mean of the workers' gradients; None where all are None."""
    model = Switched()
    optimizer = make(model)
    for step in range(len(USED)):
        gradients = []
        for worker in range(workers):
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            given = [torch.zeros_like(parameter) if part is None else part.clone() for part in parts]
            missing = all(part is None for part in parts)
            parameter.grad = None if missing else given[0] if workers == 1 else given[0].lerp(given[1], 0.5)
        optimizer.step()
    return flat(model)


def trained(team: ThreadWorkers, make: Callable[[nn.Module], Optimizer], batches: int, **options: Any) -> list[Tensor]:
    """Where each worker ends; a worker that is alone takes ``batches`` batches to a step."""

    def train(worker: int) -> Tensor:
        model = Switched()
        optimizer = make(model)
        with HybridAsync(model, optimizer, total_steps=len(USED), **options) as training:
            number = 0
            while not training.finished:
                optimizer.zero_grad()
                model.loss(worker if batches == 1 else number % batches, number // batches).backward()
                optimizer.step()
                number += 1
        return flat(model)

    return team.run(train)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_parameter_that_no_loss_uses_is_left_alone(workers: Start, make: Callable[[nn.Module], Optimizer]) -> None:
    """One worker is torch's own loop to the bit. Of two gradients of a step, from two workers or from one, the one
    without a parameter counts as zeros."""
    start = gradient_main.build
    (alone,) = trained(workers(1, start), make, 1, updates_per_step=1)
    assert torch.equal(alone, plain(make, 1))
    expected = plain(make, 2)
    assert not torch.allclose(alone, expected)
    for ended in trained(workers(2, start), make, 1, barrier=True):
        assert torch.equal(ended, expected)
    (ended,) = trained(workers(1, start), make, 2, updates_per_step=2)
    assert torch.equal(ended, expected)


def test_the_log_says_which_tensors_had_no_gradient(workers: Start, tmp_path: Path) -> None:
    trained(workers(1, gradient_main.build), OPTIMIZERS["AdamW"], 1, updates_per_step=1)
    events = [json.loads(line) for line in (tmp_path / "run-0" / "events.jsonl").open()]
    others = {0: "3f0", 1: "3cc", 2: "33c"}  # bits of weight and bias of the adapters but this one, behind the body's
    assert [event["missing"] for event in events] == [others[first] for first, _ in USED]


@pytest.mark.parametrize("codec", ["bf16", {"codec": "topk", "chunk": 16, "keep": 9, "bits": 2}], ids=str)
def test_what_a_codec_keeps_back_waits_until_its_tensor_has_a_gradient_again(workers: Start, codec: Any) -> None:
    """A missing tensor stays as it is to the bit, though its residual is not 0, and though Top-k sends zeros in a chunk
    with larger values as these."""

    def train(worker: int) -> list[Tensor]:
        model = Switched()
        optimizer = SGD(model.parameters(), lr=0.05, weight_decay=0.3)
        states = [flat(model.adapters)]
        options = {"updates_per_step": 1, "compress": {"push": codec}, "total_steps": len(USED)}
        with HybridAsync(model, optimizer, **options):
            for step in range(len(USED)):
                optimizer.zero_grad()
                model.loss(0, step).backward()
                optimizer.step()
                states.append(flat(model.adapters))
        return states

    (states,) = workers(1, gradient_main.build).run(train)
    for step, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        changed = [not torch.equal(a, b) for a, b in zip(before.split(9), after.split(9), strict=True)]
        assert changed == [number == USED[step][0] for number in range(4)]
