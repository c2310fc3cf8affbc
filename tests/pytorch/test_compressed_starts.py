"""Plain PyTorch loops whose workers start from compressed parameters, against references that round by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fairseq_async.algorithms import Int8
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.server.programs import gradient_main, local_sgd_main
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]
TARGETS = torch.tensor([[1.0, -2.0, 0.503], [0.0, 1.0, 3.0]])  # one a worker: they pull apart
LR, STEPS = 0.01, 12


class Point(nn.Module):
    """|θ − target|²/2, whose gradient is θ − target."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([1.27, 0.004, -0.3]))

    def forward(self, target: Tensor) -> Tensor:
        return (self.theta - target).square().sum() / 2


def by_int8(theta: Tensor) -> tuple[Tensor, list[Tensor]]:
    """SGD by the mean gradient at what int8 gives of each version, to which what it lost before was added."""
    carried, given = theta.clone(), []
    for _ in range(STEPS):
        start = Int8().decode(Int8().encode(carried), 3)
        given.append(start)
        theta = theta - LR * (start - TARGETS).mean(0)
        carried = carried - start + theta
    return theta, given


def test_gradients_are_of_what_int8_gives_and_the_model_ends_exact(workers: Start) -> None:
    def train(worker: int) -> tuple[list[Tensor], Tensor]:
        model, seen = Point(), []
        optimizer = SGD(model.parameters(), lr=LR)
        options = {"barrier": True, "total_steps": STEPS, "compress": "pull=int8"}
        with HybridAsync(model, optimizer, **options) as training:
            while not training.finished:
                seen.append(model.theta.detach().clone())
                optimizer.zero_grad()
                model(TARGETS[worker]).backward()
                optimizer.step()
        return seen, model.theta.detach()

    expected, given = by_int8(Point().theta.detach())
    for seen, ended in workers(2, gradient_main.build).run(train):
        torch.testing.assert_close(torch.stack(seen), torch.stack(given), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ended, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(ended, Int8().decode(Int8().encode(ended), 3), rtol=1e-4)


@pytest.mark.parametrize("codec", ["pull=bf16", {"push": "bf16", "pull": {"codec": "bf16"}}])
def test_local_steps_start_from_rounded_parameters_and_pull_gives_the_servers_own(
    workers: Start, codec: object
) -> None:
    """One worker, outer SGD of rate 1: θ ← θ − (start − local), with start the bf16 of θ."""

    def train(worker: int) -> tuple[Tensor, Tensor, Tensor]:
        model = Point()
        optimizer = SGD(model.parameters(), lr=LR)
        options = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 2, "total_steps": 3 * STEPS, "compress": codec}
        with AsyncLocalSGD(model, optimizer, **options) as training:
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(TARGETS[worker]).backward()
                optimizer.step()
            start = model.theta.detach().clone()
            training.pull()
            pulled = model.theta.detach().clone()
        return start, pulled, model.theta.detach()

    theta = Point().theta.detach()
    for _ in range(STEPS // 2):
        local = theta.bfloat16().float()
        for _ in range(2):
            local = local - LR * (local - TARGETS[0])
        delta = theta.bfloat16().float() - local
        theta = theta - (delta.bfloat16().float() if isinstance(codec, dict) else delta)
    [(start, pulled, ended)] = workers(1, local_sgd_main.build).run(train)
    tolerance = {"rtol": 0.0, "atol": 1e-4 if isinstance(codec, dict) else 1e-6}
    torch.testing.assert_close(pulled, theta, **tolerance)
    assert torch.equal(start, pulled.bfloat16().float()) and not torch.equal(start, pulled)
    assert torch.equal(ended, pulled)
