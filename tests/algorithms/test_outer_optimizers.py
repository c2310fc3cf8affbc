"""The outer optimizers against references in float64 that are written from the paper, and against each other."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import (
    BufferedNesterov,
    DelayedNesterov,
    HeLoCo,
    MomentumLookAhead,
    NesterovMomentum,
    StalenessPolicy,
    Update,
)
from recipes.rules.baselines import HeavyBall, OuterAdam
from recipes.rules.direction_averaging import DirectionAveraging
from tests.helpers.references import DelayedNesterov64

LR, BETA = 0.7, 0.9
CASES = st.tuples(st.integers(1, 5), st.integers(0, 2**31), st.floats(0, 1))  # N, seed, share of the largest c


def update(delta: Tensor, worker: int = 0) -> Update:
    return Update(worker, 0, 0, 1.0, delta)


def apply_all(rule: Any, start: Tensor, deltas: Tensor) -> tuple[Tensor, list[bool]]:
    theta = start.clone()
    return theta, [rule.apply(theta, update(delta)) for delta in deltas]


def drawn(seed: int, arrivals: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, generator=generator), torch.randn(arrivals, 3, generator=generator)


@given(CASES)
def test_delayed_nesterov_is_the_papers_algorithm(case: tuple[int, int, float]) -> None:
    n, seed, share = case
    theta, deltas = drawn(seed, 3 * n + 1)
    rule = DelayedNesterov(LR, BETA, n, c=share / n)
    after, stepped = apply_all(rule, theta, deltas)
    reference = DelayedNesterov64(theta, LR, BETA, n, share / n)
    for delta in deltas:
        reference.arrive(delta)
    assert torch.allclose(after.double(), reference.theta, rtol=1e-5, atol=1e-5)
    assert stepped == [(t + 1) % n == 0 for t in range(3 * n + 1)]


@given(CASES)
def test_arrivals_from_one_state_are_one_nesterov_step_on_their_mean(case: tuple[int, int, float]) -> None:
    """Delayed Nesterov with c = 0, the buffer, and torch's own SGD agree after every round."""
    n, seed, _ = case
    theta, deltas = drawn(seed, 4 * n)
    delayed, _ = apply_all(DelayedNesterov(LR, BETA, n), theta, deltas)
    buffered, _ = apply_all(BufferedNesterov(LR, BETA, n), theta, deltas)
    parameter = torch.nn.Parameter(theta.double())
    sgd = torch.optim.SGD([parameter], lr=LR, momentum=BETA, nesterov=True)
    for batch in deltas.double().split(n):
        parameter.grad = batch.mean(0)
        sgd.step()
    assert torch.allclose(delayed.double(), parameter.data, rtol=1e-5, atol=1e-5)
    assert torch.allclose(buffered.double(), parameter.data, rtol=1e-5, atol=1e-5)


def test_naive_nesterov_overshoots_by_the_closed_form() -> None:
    """Four equal arrivals move θ by −ε(4 + 4β + 3β² + 2β³ + β⁴)·δ, where δ is already a worker's share."""
    share = 2.0
    theta, _ = apply_all(NesterovMomentum(LR, BETA, workers=4), torch.zeros(3), torch.full((4, 3), 4 * share))
    expected = -LR * (4 + 4 * BETA + 3 * BETA**2 + 2 * BETA**3 + BETA**4) * share
    assert theta.tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_four_unit_gradients_by_hand() -> None:
    """Three steps of −ε/4 and one of −ε(β·1 + 1/4), together −ε(1 + β) = −1.33."""
    theta, stepped = apply_all(DelayedNesterov(0.7, 0.9, delay=4), torch.zeros(1), torch.ones(4, 1))
    assert theta.item() == pytest.approx(-1.33, rel=1e-6) and stepped == [False, False, False, True]


def test_a_buffer_of_more_updates_than_a_step_has_now_makes_one_step_of_their_mean() -> None:
    """As of a checkpoint of more workers: the momentum takes (1 + 2 + 3 + 6) / 4."""
    before, rule = DelayedNesterov(LR, BETA, delay=8), DelayedNesterov(LR, BETA, delay=2)
    apply_all(before, torch.zeros(1), torch.tensor([[1.0], [2.0], [3.0]]))
    rule.load_state_dict(before.state_dict())
    theta, stepped = apply_all(rule, torch.zeros(1), torch.tensor([[6.0]]))
    assert stepped == [True] and rule.momentum_buffer is not None and rule.momentum_buffer.tolist() == [3.0]
    assert theta.item() == pytest.approx(-LR * (BETA * 3.0 + 6.0 / 2), rel=1e-6)


def test_without_momentum_every_rule_is_the_sum_of_the_arrivals() -> None:
    theta, deltas = drawn(3, 6)
    expected = theta - LR / 2 * deltas.sum(0)
    for rule in (NesterovMomentum(LR, 0.0, 2), DelayedNesterov(LR, 0.0, 2), BufferedNesterov(LR, 0.0, 2)):
        assert torch.allclose(apply_all(rule, theta, deltas)[0], expected, atol=1e-6)


def test_outer_sgd_keeps_no_momentum_also_not_one_that_an_older_state_has() -> None:
    rule = NesterovMomentum(LR, 0.0, 2)
    rule.load_state_dict({"momentum_buffer": torch.full((3,), math.inf)})
    theta, _ = apply_all(rule, torch.zeros(3), torch.ones(2, 3))
    assert rule.state_dict() == {"momentum_buffer": None} and theta.tolist() == pytest.approx([-LR] * 3)


RULES: list[Callable[[], Any]] = [
    lambda: NesterovMomentum(LR, BETA, 3),
    lambda: DelayedNesterov(LR, BETA, 3, c=0.1),
    lambda: BufferedNesterov(LR, BETA, 3),
    lambda: MomentumLookAhead(LR, BETA),
    lambda: HeLoCo(LR, BETA, 3, [2, 1]),
    lambda: DirectionAveraging(LR, BETA, 3, [2, 1], embeddings=[1]),
    lambda: HeavyBall(LR, BETA, 3),
    lambda: OuterAdam(LR, BETA, 3, weight_decay=0.1),
]


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_restart_in_the_middle_of_a_buffer_changes_no_bit(make: Callable[[], Any], cut: int) -> None:
    theta, deltas = drawn(5, 8)
    whole, _ = apply_all(make(), theta, deltas)
    first, second = make(), make()
    halfway, _ = apply_all(first, theta, deltas[:cut])
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.dispatch(halfway), first.dispatch(halfway))
    assert torch.equal(apply_all(second, halfway, deltas[cut:])[0], whole)


@pytest.mark.parametrize("rule", [DelayedNesterov, BufferedNesterov])
def test_a_buffer_of_more_workers_is_emptied_by_fewer(rule: Callable[..., Any]) -> None:
    """Three of four updates are in the buffer; two workers go on, and the fourth update makes the step."""
    four, two, theta = rule(1.0, 0.5, 4), rule(1.0, 0.5, 2), torch.zeros(3)
    apply_all(four, theta, torch.ones(3, 3))
    two.load_state_dict(four.state_dict())
    assert [two.apply(theta, update(torch.ones(3))) for _ in range(3)] == [True, False, True]
    assert two.momentum_buffer.tolist() == [1.5] * 3


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("begun", range(4))
def test_a_rule_says_which_updates_will_move_the_parameters(make: Callable[[], Any], begun: int) -> None:
    rule, theta = make(), torch.zeros(3)
    apply_all(rule, theta, torch.ones(begun, 3))
    announced, moved = [rule.moves_parameters(ahead) for ahead in range(7)], []
    for _ in range(7):
        before = theta.clone()
        rule.apply(theta, update(torch.ones(3)))
        moved.append(not torch.equal(before, theta))
    assert announced == moved


def test_a_buffer_that_holds_more_than_it_may_by_now_is_emptied_next() -> None:
    rule, theta = BufferedNesterov(1.0, 0.5, 4), torch.zeros(3)
    apply_all(rule, theta, torch.ones(3, 3))
    rule.limit_round(2)
    assert [rule.moves_parameters(ahead) for ahead in range(4)] == [True, False, True, False]
    assert [rule.apply(theta, update(torch.ones(3))) for _ in range(4)] == [True, False, True, False]


def test_a_round_of_fewer_workers_is_averaged_over_them() -> None:
    rule, theta = BufferedNesterov(1.0, 0.0, 3), torch.zeros(1)
    rule.limit_round(2)
    assert [rule.apply(theta, update(torch.ones(1) * v)) for v in (1.0, 3.0)] == [False, True]
    assert theta.item() == -2.0
    rule.limit_round(5)
    assert rule.buffer_size == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedNesterov(0.7, 0.9, 0), "delay is 0"),
        (lambda: DelayedNesterov(0.7, 0.9, 4, c=0.26), r"c is 0.26; it must be in \[0, 1/delay\] = \[0, 0.25\]"),
        (lambda: DelayedNesterov(0.7, 0.9, 4, c=-0.1), "c is -0.1"),
        (lambda: BufferedNesterov(0.7, 1.0, 4), "momentum is 1.0"),
        (lambda: NesterovMomentum(0.0, 0.9, 4), "lr is 0.0"),
        (lambda: NesterovMomentum(math.nan, 0.9, 4), "lr is nan"),
        (lambda: NesterovMomentum(math.inf, 0.9, 4), "lr is inf"),
        (lambda: NesterovMomentum(0.7, 0.9, 0), "workers is 0"),
        (lambda: MomentumLookAhead(0.7, 1.0), "momentum is 1.0"),
        (lambda: HeLoCo(0.7, 0.9, 0, [3]), "workers is 0"),
        (lambda: DirectionAveraging(0.7, 0.9, 0, [3]), "round_size is 0"),
        (lambda: OuterAdam(0.7, 0.9, 4, beta2=1.0), "beta2 is 1.0"),
        (lambda: OuterAdam(0.7, 0.9, 4, weight_decay=-1.0), "weight_decay is -1.0"),
        (lambda: OuterAdam(0.7, 0.9, 4, weight_decay=math.nan), "weight_decay is nan"),
        (lambda: StalenessPolicy(power=0.5), "power is 0.5"),
        (lambda: StalenessPolicy(power=math.nan), "power is nan"),
        (lambda: StalenessPolicy(limit=-1), "limit is -1"),
        (lambda: StalenessPolicy(compensation=-1.0), "compensation is -1.0"),
        (lambda: StalenessPolicy(compensation=math.nan), "compensation is nan"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_compensation_that_fp32_cannot_hold_leaves_the_update_as_it_is() -> None:
    g, now, then = torch.tensor([1e25, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0])
    late = update(g)
    assert StalenessPolicy(compensation=0.5).adjusted(late, 3, now, then) is late


@pytest.mark.parametrize("power", [0.0, -0.5])
@pytest.mark.parametrize("compensation", [0.0, 0.25])
@pytest.mark.parametrize("share", [1.0, 1.5])
@pytest.mark.parametrize("known", [False, True])
def test_staleness_weighs_and_compensates_by_its_formulas(
    power: float, compensation: float, share: float, known: bool
) -> None:
    """All of them together; of an update whose start is not known, the weight alone."""
    g, now, then = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0])
    late = replace(update(g), share=share)
    adjusted = StalenessPolicy(power, compensation=compensation).adjusted(late, 3, now, then if known else None)
    expected = share * 4**power * (g + compensation * g * g * (now - then) * known)
    assert torch.equal(adjusted.delta, expected)
    assert (adjusted is late) == torch.equal(expected, g)


def test_an_update_above_the_limit_is_dropped() -> None:
    assert (
        not StalenessPolicy(limit=10).drops(10)
        and StalenessPolicy(limit=10).drops(11)
        and not StalenessPolicy().drops(1000)
    )
