"""The learning rate of steps with fewer gradients, by what it is for."""

from collections.abc import Callable
from functools import partial
from itertools import repeat

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.hybrid import partial_rate
from fairseq_async.algorithms.muon import MuonAdamW

STEPS, SIZE = 300, 20_000  # whole steps of 4 gradients; parameters


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_whole_step_has_the_whole_rate_to_the_bit(make: type[torch.optim.Optimizer]) -> None:
    assert partial_rate(make([torch.zeros(1)], lr=0.1), 1.0) == 1.0  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "rate"),
    [(torch.optim.RMSprop, 0.5), (torch.optim.Muon, 0.5), (MuonAdamW, 0.5), (torch.optim.Adagrad, 0.25)],
)
def test_what_divides_by_a_running_mean_has_the_square_root(make: type[torch.optim.Optimizer], rate: float) -> None:
    assert partial_rate(make([torch.zeros(2, 2)], lr=0.1), 0.25) == rate  # type: ignore[call-arg]


def moved(n: int, make: type[torch.optim.Optimizer], signal: float, noise: float) -> float:
    """How far an optimizer goes in steps of n of 4 gradients, in the mean of many parameters."""
    random = torch.Generator().manual_seed(1)
    parameters = torch.zeros(SIZE)
    rule = HybridAccumulation(make([parameters], lr=0.001), 4, partial_steps=True)  # type: ignore[call-arg]

    def gradient() -> Tensor:
        return signal + noise * torch.randn(SIZE, generator=random)

    shares = 0.0
    for _ in repeat(None, STEPS * 4 // n):
        rule.limit_round(n)
        shares += sum(rule.apply(parameters, Update(0, 0, 0, 1.0, gradient())) for _ in range(n))
    assert shares == pytest.approx(STEPS)
    return -float(parameters.mean())


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_noisy_gradients_move_the_parameters_as_far_as_in_whole_steps(
    n: int, make: type[torch.optim.Optimizer]
) -> None:
    """With n/k of the learning rate Adam would go half as far by single gradients."""
    assert moved(n, make, signal=0.05, noise=1.0) == pytest.approx(moved(4, make, 0.05, 1.0), rel=0.05)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_without_noise_move_sgd_as_far_and_adam_further(n: int) -> None:
    """The price of not knowing how much of a gradient is noise: at most the square root of k/n."""
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    assert moved(n, sgd, 1.0, 0.0) == pytest.approx(moved(4, sgd, 1.0, 0.0), rel=1e-4)
    assert moved(n, adam, 1.0, 0.0) == pytest.approx((4 / n) ** 0.5 * moved(4, adam, 1.0, 0.0), rel=1e-3)


class Decoupled(torch.optim.SGD):
    """Of another library: it has betas, and a decay that is no part of the gradient."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0] |= {"betas": (0.9, 0.98), "weight_decay": weight_decay}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.Adam, decoupled_weight_decay=True), Decoupled])
def test_a_weight_decay_beside_the_gradient_is_that_of_whole_steps(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Sixteen gradients of zeros, in steps of 4, of 1, and of 3 and 1."""
    left = []
    for sizes in ([4] * 4, [1] * 16, [3, 1] * 4):
        parameters = torch.ones(3, dtype=torch.float64)
        optimizer = make([parameters], lr=0.01, weight_decay=0.1)
        rule = HybridAccumulation(optimizer, 4, partial_steps=True)
        for size in sizes:
            rule.limit_round(size)
            for _ in range(size):
                rule.apply(parameters, Update(0, 0, 0, 1.0, torch.zeros(3, dtype=torch.float64)))
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        left.append(float(parameters[0]))
    assert left[1:] == pytest.approx([left[0]] * 2, rel=1e-5) and left[0] == pytest.approx(0.999**4)


def test_a_weight_decay_in_the_gradient_stays_as_it_is() -> None:
    parameters = torch.ones(1)
    optimizer = torch.optim.Adam([parameters], lr=0.01, weight_decay=0.1)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["weight_decay"]))
    rule = HybridAccumulation(optimizer, 4, partial_steps=True)
    rule.limit_round(1)
    rule.apply(parameters, Update(0, 0, 0, 1.0, torch.ones(1)))
    assert seen == [0.1]
