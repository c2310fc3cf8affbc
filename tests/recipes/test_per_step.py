"""Division of a pseudo-gradient by its steps, or by its summed learning rate, by hand."""

import pytest
import torch

from fairseq_async.algorithms import Update
from fairseq_async.method.methods import RuleContext
from recipes.rules.per_step import PerStep, PerStepOptions, build


def update(worker: int, steps: float, delta: float) -> Update:
    return Update(worker, 0, 0, steps, torch.tensor([delta]))


def test_an_update_of_half_the_steps_counts_twice() -> None:
    """With H = 4, ε = 1 and two workers: 8 · 4/4 / 2 = 4, then 8 · 4/2 / 2 = 8."""
    rule, theta = build(PerStepOptions(outer_lr=1.0, local_steps=4), RuleContext(2)), torch.zeros(1)
    for steps, expected in ((4.0, -4.0), (2.0, -12.0)):
        assert rule.apply(theta, update(0, steps, 8.0)) is True
        assert theta.item() == pytest.approx(expected)


def test_a_summed_rate_is_that_of_the_schedule_between_a_workers_updates() -> None:
    """A cosine to 0 in 8 steps: 1 at the start, ½ at 4, about 0.146 at 6 and 0 at 8. Two workers in turn, H = 4."""
    options = PerStepOptions(outer_lr=1.0, local_steps=4, divide_by="rate", minimum=0.0, total_steps=8)
    rule, theta = build(options, RuleContext(2)), torch.zeros(1)
    half, later = 0.5, 0.5 * (1 - 0.5**0.5)
    means = [(1 + 0.5 * (1 + 0.5**0.5)) / 2, (1 + half) / 2, (0.5 * (1 + 0.5**0.5) + later) / 2]
    expected = 0.0
    for worker, mean in zip((0, 1, 0), means, strict=True):
        rule.apply(theta, update(worker, 4.0, 2.0))
        expected -= 1.0 / mean
        assert theta.item() == pytest.approx(expected, rel=1e-5)
        other = PerStep(1.0, 2, 4, rule.rate)
        other.load_state_dict(rule.state_dict())
        rule = other


def test_without_a_schedule_both_divisions_are_the_same() -> None:
    thetas = []
    for divide_by in ("steps", "rate"):
        options = PerStepOptions(outer_lr=0.7, local_steps=5, divide_by=divide_by, total_steps=100)  # type: ignore[arg-type]
        rule, theta = build(options, RuleContext(3)), torch.ones(1)
        for number, steps in enumerate((5.0, 1.0, 3.0, 2.0)):
            rule.apply(theta, update(number % 3, steps, 0.1 * steps))
        thetas.append(theta.item())
    assert thetas[0] == pytest.approx(thetas[1]) and thetas[0] != 1
