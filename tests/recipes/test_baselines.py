"""Heavy ball, Adam and AdamW as outer optimizers against torch's own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from fairseq_async.algorithms import Rule, Update
from recipes.rules.baselines import HeavyBall, OuterAdam

Make = Callable[[], Rule]
Torch = Callable[[list[Parameter]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Torch]] = {
    "heavy ball": (lambda: HeavyBall(0.1, 0.9, 4), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adam": (lambda: OuterAdam(0.1, 0.8, 4), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.999))),
    "AdamW": (
        lambda: OuterAdam(0.1, 0.9, 4, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@given(seed=st.integers(0, 2**31))
def test_each_arrival_is_a_step_of_torchs_optimizer_on_a_workers_share(name: str, seed: int) -> None:
    make, torchs = PAIRS[name]
    theta, *deltas = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    rule, parameter = make(), Parameter(theta.double())
    optimizer = torchs([parameter])
    for delta in deltas:
        assert rule.apply(theta, Update(0, 0, 0, 1.0, delta)) is True
        parameter.grad = delta.double() / 4
        optimizer.step()
        assert torch.allclose(theta.double(), parameter.data, rtol=1e-3, atol=1e-4)


def test_a_heavy_ball_by_hand() -> None:
    """m = 1, then 1.9: θ = −0.1 and −0.29."""
    rule, theta = HeavyBall(0.1, 0.9, 1), torch.zeros(1)
    for expected in (-0.1, -0.29):
        rule.apply(theta, Update(0, 0, 0, 1.0, torch.ones(1)))
        assert theta.item() == pytest.approx(expected)
