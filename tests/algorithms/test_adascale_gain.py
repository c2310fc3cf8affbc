"""The gain of AdaScale (Johnson et al. 2020) against the paper's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_async.algorithms import AdaScaleGain
from tests.helpers.references import norms, papers_gains


def test_before_any_statistics_the_gain_is_one() -> None:
    gain = AdaScaleGain(16)
    assert gain.gain == 1.0 and gain.scale_invariant_steps == 0.0 and math.isnan(gain.noise_scale)


def test_two_gradients_worked_out_by_hand() -> None:
    gain = AdaScaleGain(2)
    # g = (3, 1) and (1, 1): σ̂² = (10 + 2)/1 − 2·5 = 2, μ̂² = 5 − 2/2 = 4, r = (2 + 4)/(2/2 + 4)
    assert gain.update([10.0, 2.0], 5.0) == 1.0, "the first step has no others before it"
    assert (gain.variance, gain.square_mean, gain.noise_scale) == pytest.approx((2.0, 4.0, 0.5))
    assert gain.scale_invariant_steps == 1.0
    assert gain.gain == pytest.approx(6 / 5), "of the next step"
    # (4, 0) and (0, 0): σ̂² = 16 − 2·4 = 8, μ̂² = 4 − 4 = 0; the gain is that of the step before alone
    assert gain.update([16.0, 0.0], 4.0) == pytest.approx(6 / 5)
    assert gain.scale_invariant_steps == pytest.approx(11 / 5)
    assert gain.gain == pytest.approx((5 + 2) / (5 / 2 + 2))


def test_identical_gradients_have_a_gain_of_one() -> None:
    gain = AdaScaleGain(8)
    assert [gain.update([5.0] * 8, 5.0) for _ in range(2)] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_gradients_of_pure_noise_have_a_gain_of_the_scale() -> None:
    for mean in (0.25, 0.0):  # orthogonal: |ḡ|² = 1/4, so μ̂² = 0; or they cancel: μ̂² would be negative
        gain = AdaScaleGain(4)
        gain.update([1.0] * 4, mean)
        assert gain.gain == pytest.approx(4.0)


def test_the_variance_is_at_least_a_millionth_and_the_square_mean_uses_it_as_it_was() -> None:
    gain = AdaScaleGain(2)
    gain.update([1.0, 1.0], 1.5)  # σ̂² = 2 − 3 = −1; μ̂² = 1.5 + 1/2
    assert gain.variance == 1e-6 and gain.square_mean == 2.0


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([2, 3, 16, 400, 999, 1000, 2000]),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12),
)
def test_it_equals_the_papers_formulas(scale: int, drawn: list[tuple[float, float]]) -> None:
    iterations = [([local] * scale, mean) for local, mean in drawn]
    gain = AdaScaleGain(scale)
    gains = [gain.update(*iteration) for iteration in iterations]
    assert gains == pytest.approx(papers_gains(iterations, scale), rel=1e-6)
    assert all(1 <= r <= scale for r in gains)
    assert gain.scale_invariant_steps == pytest.approx(sum(gains))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**31), st.floats(0, 30))
def test_the_gain_of_real_gradients_lies_between_one_and_the_scale(scale: int, seed: int, signal: float) -> None:
    torch.manual_seed(seed)
    gain = AdaScaleGain(scale)
    for _ in range(3):
        assert 1 <= gain.update(*norms([signal + torch.randn(7) for _ in range(scale)])) <= scale


def test_the_averages_turn_from_a_mean_into_an_exponential_one() -> None:
    gain = AdaScaleGain(250)  # θ = 0.75: a mean over the first four
    for value in (1.0, 2.0, 3.0, 6.0):
        gain.observe(0.0, 2, value, batches=2)  # σ̂² at its bound, μ̂² = 2·value
    assert gain.square_mean == pytest.approx(2 * 3.0)
    gain.observe(0.0, 2, 11.0, batches=2)
    assert gain.square_mean == pytest.approx(2 * (0.75 * 3.0 + 0.25 * 11.0))


def test_smoothing_overrides_the_papers() -> None:
    assert AdaScaleGain(16).smoothing == pytest.approx(0.984) and AdaScaleGain(5000).smoothing == 0.0
    gain = AdaScaleGain(2, smoothing=0.0)
    gain.update([10.0, 2.0], 5.0)
    gain.update([5.0, 5.0], 2.5)
    assert gain.variance == 5.0  # the last estimate alone


def test_a_scale_of_one_is_plain_training() -> None:
    gain = AdaScaleGain(1)
    assert [gain.update([3.0], 3.0) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert gain.scale_invariant_steps == 3.0
    assert gain.update([3.0, 5.0], 1.0) == 1.0  # two halves of one batch: they tell the noise, the gain stays
    assert gain.noise_scale > 0


def test_gradients_of_more_than_one_batch_give_the_same_estimate() -> None:
    torch.manual_seed(0)
    singles, pairs = AdaScaleGain(16, smoothing=0.9995), AdaScaleGain(16, smoothing=0.9995)
    for _ in range(2000):
        batches = torch.randn(16, 10) + 0.5
        singles.update(*norms(list(batches)))
        pairs.update(*norms(list(batches.view(8, 2, 10).mean(1))))
    assert singles.variance == pytest.approx(10.0, rel=0.02) and pairs.variance == pytest.approx(10.0, rel=0.02)
    assert singles.square_mean == pytest.approx(2.5, rel=0.02) and pairs.square_mean == pytest.approx(2.5, rel=0.02)


def test_the_scale_may_change_while_training_runs() -> None:
    gain = AdaScaleGain(2)
    gain.update([10.0, 2.0], 5.0)
    gain.scale = 4  # σ² and μ² are of single batches and stay: (2 + 4)/(2/4 + 4)
    assert gain.gain == pytest.approx(6 / 4.5)
    with pytest.raises(ValueError, match=r"scale is 0\.5; it must be at least 1"):
        gain.scale = 0.5


def test_gain_and_noise_scale_say_the_same() -> None:
    gain = AdaScaleGain(16)
    gain.update([3.0] * 16, 1.0)
    phi = gain.noise_scale
    assert gain.gain == pytest.approx(16 * (phi + 1) / (phi + 16))


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_stopping_and_going_on_changes_nothing(stop: int) -> None:
    torch.manual_seed(stop)
    iterations = [norms(list(torch.randn(4, 3) + 0.3)) for _ in range(8)]
    straight, first, second = AdaScaleGain(4, 0.8), AdaScaleGain(4, 0.8), AdaScaleGain(4, 0.8)
    expected = [straight.update(*iteration) for iteration in iterations]
    before = [first.update(*iteration) for iteration in iterations[:stop]]
    second.load_state_dict(first.state_dict())
    assert before + [second.update(*iteration) for iteration in iterations[stop:]] == expected
    assert second.scale_invariant_steps == straight.scale_invariant_steps


@pytest.mark.parametrize("wrong", [{"scale": 0.9}, {"scale": math.nan}, {"scale": 2, "smoothing": 1.0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        AdaScaleGain(**wrong)


def test_norms_that_are_none_and_a_single_gradient_are_refused() -> None:
    gain = AdaScaleGain(2)
    for local, mean in (([1.0, math.nan], 1.0), ([1.0, math.inf], 1.0), ([-1.0, 2.0], 1.0), ([1.0, 1.0], -1.0)):
        with pytest.raises(ValueError, match="finite"):
            gain.update(local, mean)
    with pytest.raises(ValueError, match="noise shows from two on"):
        gain.update([1.0], 1.0)
    assert gain.estimates == 0
    with pytest.raises(ValueError, match="finite"):
        AdaScaleGain(1).update([1.0], math.nan)
