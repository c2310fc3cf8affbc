"""MLA and HeLoCo against references in float64 that are written from their papers, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import DelayedNesterov, HeLoCo, MomentumLookAhead, NesterovMomentum, Update

LR, GAMMA = 0.7, 0.9
SIZES = [2, 1, 4]


def update(*values: float) -> Update:
    return Update(0, 0, 0, 1.0, torch.tensor(values))


class Paper:
    """Both rules on lists of tensors in float64; without workers it is MLA."""

    def __init__(self, theta: list[Tensor], workers: int | None) -> None:
        self.theta, self.workers = theta, workers
        self.m = [torch.zeros_like(each) for each in theta]

    def arrive(self, deltas: list[Tensor]) -> None:
        for i, delta in enumerate(deltas):
            if self.workers is not None:
                delta = self.turned(delta, self.m[i]) / math.sqrt(self.workers)
            self.m[i] = GAMMA * self.m[i] + (1 - GAMMA) * delta
            self.theta[i] = self.theta[i] - LR * (delta + GAMMA * self.m[i])

    @staticmethod
    def turned(delta: Tensor, m: Tensor) -> Tensor:
        size, drift = delta.norm().item(), m.norm().item()
        if size < 1e-8 or drift < 1e-8:
            return delta
        unit_delta, unit_m = delta / size, m / drift
        c = (unit_delta * unit_m).sum().item()
        conf = size / (size + 3 * drift + 1e-8)
        if c >= 0.2:
            return delta
        if c < 0:
            return delta - min(0.5 * -c * conf, 0.5) * (delta * unit_m).sum() * unit_m
        lam = min((1 - c) * conf, 1)
        mixed = (1 - lam) * unit_delta + lam * unit_m
        return size * mixed / mixed.norm()

    def dispatch(self) -> Tensor:
        return torch.cat([t - LR * GAMMA * m for t, m in zip(self.theta, self.m, strict=True)])


@given(st.integers(0, 2**31), st.sampled_from([None, 1, 5]), st.floats(-3, 3))
def test_both_rules_are_their_papers_formulas(seed: int, workers: int | None, drift: float) -> None:
    """``drift`` makes updates that point the same way, or any way."""
    generator = torch.Generator().manual_seed(seed)
    theta, *deltas = torch.randn(9, sum(SIZES), generator=generator)
    rule = MomentumLookAhead(LR, GAMMA) if workers is None else HeLoCo(LR, GAMMA, workers, SIZES)
    paper = Paper(list(theta.double().split(SIZES)), workers)
    for number, delta in enumerate(deltas):
        delta = delta + drift * (number % 3 == 0)
        paper.arrive(list(delta.double().split(SIZES)))
        assert rule.apply(theta, Update(number % 5, 0, 0, 1.0, delta)) is True
        assert torch.allclose(theta.double(), torch.cat(paper.theta), rtol=1e-4, atol=1e-4)
        assert torch.allclose(rule.dispatch(theta).double(), paper.dispatch(), rtol=1e-4, atol=1e-4)


def test_one_arrival_by_hand() -> None:
    """m = 0.1; θ = −0.7·(1 + 0.09) = −0.763; a worker starts from −0.763 − 0.063 = −0.826."""
    rule, theta = MomentumLookAhead(0.7, 0.9), torch.zeros(3)
    assert rule.dispatch(theta).tolist() == [0.0] * 3
    assert rule.apply(theta, update(1.0, 1.0, 1.0)) is True
    before = theta.clone()
    assert theta.tolist() == pytest.approx([-0.763] * 3)
    assert rule.dispatch(theta).tolist() == pytest.approx([-0.826] * 3)
    assert torch.equal(theta, before), "the parameters are not ahead"


def test_in_the_end_an_arrival_has_moved_the_parameters_by_lr_times_1_plus_momentum() -> None:
    rule, theta = MomentumLookAhead(0.7, 0.9), torch.zeros(1)
    rule.apply(theta, update(1.0))
    for _ in range(400):
        rule.apply(theta, update(0.0))
    assert theta.item() == pytest.approx(-1.33, rel=1e-5)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ([2.0, 0.0], [2.0, 0.0]),  # along the momentum
        ([0.6, 0.8], [0.6, 0.8]),  # cosine 0.6
        ([-1.0, 0.0], [-1.0 + 0.5 * 0.25, 0.0]),  # against it: conf = 1/(1 + 3), b = 0.125
        ([0.0, 1.0], [0.25 / math.hypot(0.25, 0.75), 0.75 / math.hypot(0.25, 0.75)]),  # across: λ = conf = 0.25
        ([1e-9, 0.0], [1e-9, 0.0]),  # too short to have a direction
    ],
    ids=["along", "near", "against", "across", "tiny"],
)
def test_an_update_is_turned_towards_a_momentum_of_one_along_the_first_axis(
    delta: list[float], expected: list[float]
) -> None:
    rule = HeLoCo(1.0, 0.0, workers=4, tensors=[2])
    rule.momentum_buffer = torch.tensor([1.0, 0.0])
    theta = torch.zeros(2)
    rule.apply(theta, update(*delta))
    assert theta.tolist() == pytest.approx([-value / 2 for value in expected], rel=1e-5), "ρ = 1/√4"


def test_each_tensor_is_turned_by_itself_and_the_update_is_left_as_it_was() -> None:
    rule, theta, sent = HeLoCo(1.0, 0.0, 1, [1, 1]), torch.zeros(2), update(-1.0, 2.0)
    rule.momentum_buffer = torch.tensor([1.0, 1.0])
    rule.apply(theta, sent)
    assert theta.tolist() == pytest.approx([1.0 - 0.125, -2.0])
    assert sent.delta.tolist() == [-1.0, 2.0]


def test_the_start_ahead_is_a_switch_of_every_rule_with_a_momentum() -> None:
    for rule in (
        MomentumLookAhead(0.7, 0.9, start_ahead=False),
        HeLoCo(0.7, 0.9, 2, [1], start_ahead=False),
        NesterovMomentum(0.7, 0.9, 2),
        DelayedNesterov(0.7, 0.9, 1),
    ):
        theta = torch.zeros(1)
        rule.apply(theta, update(1.0))
        assert rule.dispatch(theta) is theta
        rule.start_ahead = True
        assert rule.momentum_buffer is not None
        assert rule.dispatch(theta).item() == pytest.approx(theta.item() - 0.63 * rule.momentum_buffer.item())
