"""AdaScale (Johnson et al. 2020) round real optimizers, on one process."""

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fairseq_async.algorithms import AdaScaleGain
from fairseq_async.collective import AdaScale
from fairseq_async.collective.adascale import step_norms
from fairseq_async.collective.adascale.adam_norm import AdamNorm
from fairseq_async.collective.adascale.square_norms import LocalSquareNorms, norm_of, plain_norm
from fairseq_async.collective.adascale.step_norms import Differences, StepNormMeter
from fairseq_async.errors import ConfigurationError
from tests.helpers.commands import ROOT
from tests.helpers.references import norms

Batches = list[tuple[Tensor, Tensor]]


def task(batches: int, seed: int = 0, size: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 2, generator=generator)) for _ in range(batches)
    ]


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
    return loss


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, batch), list(model.parameters()))])


def train(model: nn.Module, adascale: AdaScale, batches: Batches, accumulation: int) -> list[float]:
    """The gains of the steps."""
    gains = []
    for start in range(0, len(batches), accumulation):
        for batch in batches[start : start + accumulation]:
            (loss_of(model, batch) / accumulation).backward()
        adascale.step()
        adascale.zero_grad()
        gains.append(adascale.gain)
    return gains


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def test_the_estimates_equal_brute_force_over_per_sample_gradients() -> None:
    model, samples = small_model(), task(32, size=1)
    local, mean = norms([gradient(model, sample) for sample in samples])
    adascale = AdaScale(sgd(model), accumulation=32)
    train(model, adascale, samples, 32)
    variance = sum(local) / 31 - 32 / 31 * mean
    assert adascale.gains.whole.variance == pytest.approx(variance, rel=1e-4)
    assert adascale.gains.whole.square_mean == pytest.approx(mean - variance / 32, rel=1e-3)


def test_a_step_goes_as_far_as_the_gain_says_and_the_rate_is_as_before() -> None:
    """The second step, whose gain is that of the first step's gradients."""
    model, batches = small_model(), task(8)
    adascale = AdaScale(sgd(model), accumulation=4)
    expected = AdaScaleGain(4)
    expected.update(*norms([gradient(model, batch) for batch in batches[:4]]))
    assert train(model, adascale, batches[:4], 4) == [1.0]
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    mean = torch.stack([gradient(model, batch) for batch in batches[4:]]).mean(0)
    train(model, adascale, batches[4:], 4)
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    assert adascale.gain == pytest.approx(expected.gain, rel=1e-4) and adascale.gain > 1.05
    torch.testing.assert_close(moved, 0.05 * adascale.gain * mean)
    assert adascale.param_groups[0]["lr"] == 0.05
    assert adascale.scale_invariant_steps == 1 + adascale.gain


def test_the_momentum_is_not_multiplied_by_the_gain() -> None:
    model, twin, batches = small_model(), small_model(), task(24)
    adascale = AdaScale(sgd(model, momentum=0.9), accumulation=4)
    momentum = torch.zeros_like(gradient(twin, batches[0]))
    for start in range(0, 24, 4):
        momentum = 0.9 * momentum + torch.stack([gradient(twin, b) for b in batches[start : start + 4]]).mean(0)
        (gain,) = train(model, adascale, batches[start : start + 4], 4)
        flat = nn.utils.parameters_to_vector(twin.parameters()).detach() - 0.05 * gain * momentum
        nn.utils.vector_to_parameters(flat, twin.parameters())
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), flat)


def test_a_scale_of_one_trains_as_the_optimizer_alone_to_the_bit() -> None:
    model, plain, batches = small_model(), small_model(), task(6)
    train(model, AdaScale(sgd(model, momentum=0.9), scale=1), batches, 1)
    optimizer = sgd(plain, momentum=0.9)
    for batch in batches:
        loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_parameter_group_has_a_gain_of_its_own() -> None:
    model, batches = small_model(), task(8)
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.SGD([{"params": layers[0]}, {"params": layers[1], "lr": 0.5}], lr=0.05)
    adascale = AdaScale(optimizer, accumulation=8)
    expected = []
    for layer in layers:
        each = [torch.autograd.grad(loss_of(model, b), layer) for b in batches]
        gain = AdaScaleGain(8)
        gain.update(*norms([torch.cat([g.flatten() for g in e]) for e in each]))
        expected.append(gain.gain)
    train(model, adascale, batches, 8)
    assert [gain.gain for gain in adascale.gains.groups] == pytest.approx(expected, rel=1e-4)
    assert expected[0] != pytest.approx(expected[1], rel=1e-2)
    assert min(expected) <= adascale.gains.whole.gain <= max(expected)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]


@pytest.mark.parametrize(("kind", "precision"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=str)
def test_adam_steps_by_the_root_of_a_gain_of_preconditioned_norms(kind: torch.dtype, precision: float) -> None:
    model, batches = small_model().to(kind), [(x.to(kind), y.to(kind)) for x, y in task(32)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    adascale = AdaScale(optimizer, accumulation=4)
    assert train(model, adascale, batches[:20], 4) == [1.0] * 5  # v̂ is no scale yet
    factors = []
    for parameter in model.parameters():
        v = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999**5)
        factors.append((1 / (v.sqrt() + 1e-8)).flatten())
    each = [gradient(model, batch) * torch.cat(factors) for batch in batches[20:24]]
    expected = AdaScaleGain(4)
    expected.update(*norms(each))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    assert train(model, adascale, batches[20:28], 4) == pytest.approx([1.0, expected.gain], rel=precision)
    assert rates == pytest.approx([1e-3, 1e-3 * math.sqrt(expected.gain)], rel=precision)
    assert adascale.scale_invariant_steps == pytest.approx(6 + expected.gain, rel=precision)
    train(model, adascale, batches[28:], 4)
    assert float(optimizer.state[next(model.parameters())]["step"]) == 8


def test_an_element_that_adam_has_never_moved_does_not_drown_the_others() -> None:
    table = nn.Embedding(3, 2)
    adascale = AdaScale(torch.optim.Adam(table.parameters()), accumulation=2)
    for step in range(8):
        for row in (0, 1 if step < 7 else 2):  # row 2 has its first gradient now: 1/eps of it would be 1e8
            (table(torch.tensor([row])).square().sum() / 2).backward()
        adascale.step()
        adascale.zero_grad()
    assert adascale.gains.whole.variance < 1e3


def test_of_a_flat_master_a_parameter_has_the_moments_of_its_own_elements() -> None:
    own, flat = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))], nn.Parameter(torch.zeros(10))
    alone, together = torch.optim.Adam(own), torch.optim.Adam([flat])
    masters, generator = {own[0]: (flat, 0), own[1]: (flat, 6)}, torch.Generator().manual_seed(1)
    for _ in range(AdamNorm.STEPS):
        flat.grad = torch.randn(10, generator=generator) * torch.arange(1.0, 11.0)
        own[0].grad, own[1].grad = flat.grad[:6].view(2, 3), flat.grad[6:]
        alone.step(), together.step()
    for parameter in own:
        expected, found = (norm(parameter, parameter.grad) for norm in (AdamNorm(alone), AdamNorm(together, masters)))
        assert expected is not None and found is not None and torch.equal(expected, found)


@pytest.mark.parametrize("clips", [True, False])
def test_a_loss_scale_and_clipping_are_no_part_of_the_statistics(clips: bool) -> None:
    plain, scaled = small_model(), small_model()
    one, other = AdaScale(sgd(plain), accumulation=4), AdaScale(sgd(scaled), accumulation=4)
    train(plain, one, task(4), 4)
    for batch in task(4):
        (1024 * loss_of(scaled, batch) / 4).backward()
    for parameter in scaled.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1024
    if clips:
        other.measure(loss_scale=1024)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1e-3)
        other.step()
    else:
        other.step(loss_scale=1024)
    assert other.gains.whole.gain == pytest.approx(one.gains.whole.gain, rel=1e-5)
    assert other.gains.whole.variance == pytest.approx(one.gains.whole.variance, rel=1e-5)


def test_it_works_with_a_grad_scaler_that_skips_a_step() -> None:
    plain, scaled, batches = small_model(), small_model(), task(8)
    one, other = AdaScale(sgd(plain), accumulation=4), AdaScale(sgd(scaled), accumulation=4)
    train(plain, one, batches, 4)
    scaler, like_an_optimizer = torch.amp.GradScaler("cpu", init_scale=4096.0), cast(Any, other)
    for tried in ([(batches[0][0], batches[0][1] * math.inf), *batches[1:4]], batches[:4], batches[4:]):
        for batch in tried:
            scaler.scale(loss_of(scaled, batch) / 4).backward()
        scaler.unscale_(like_an_optimizer)
        other.measure(loss_scale=scaler.get_scale())
        scaler.step(like_an_optimizer)
        scaler.update()
        other.zero_grad()
    assert other.steps == 2 and scaler.get_scale() == 2048.0
    assert other.gain == pytest.approx(one.gain, rel=1e-4) and one.gain > 1
    assert other.gains.whole.variance == pytest.approx(one.gains.whole.variance, rel=1e-4)


class OnGpu(Tensor):
    """A norm that is not read before it is asked for."""

    is_cpu = False


def test_norms_on_a_gpu_are_those_of_one_step_each_pass_by_its_weight() -> None:
    parameter = torch.ones(2, requires_grad=True)
    of_passes = LocalSquareNorms([[parameter]], lambda _, gradient: norm_of(gradient).as_subclass(OnGpu))  # type: ignore[arg-type]
    for weight in (1.0, 3.0):
        of_passes.weight = weight
        for gradient in ([3.0, 4.0], [0.0, 2.0]):
            (parameter * torch.tensor(gradient)).sum().backward()
        assert of_passes.sums(torch.device("cpu")).tolist() == [weight * (25.0 + 4.0)] and of_passes.passes == 2
        of_passes.clear()


def test_passes_are_those_of_the_parameter_that_has_had_most_gradients() -> None:
    often, once = (torch.ones(1, requires_grad=True) for _ in range(2))
    of_passes = LocalSquareNorms([[often], [once]], plain_norm)
    (often * once).sum().backward()
    (3 * often).sum().backward()
    assert of_passes.passes == 2 and of_passes.sums(torch.device("cpu")).tolist() == [10.0, 1.0]


def test_a_step_with_nan_leaves_the_averages_as_they_were() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=2)
    train(model, adascale, task(4), 2)
    saved = adascale.gains.whole.state_dict()
    for factor, in_mean in ((math.nan, 0.0), (1.0, math.inf)):
        (loss_of(model, task(1)[0]) * factor).backward()
        loss_of(model, task(1)[0]).backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, in_mean)  # as where it was on another rank
        adascale.measure()
        adascale.gains.advance()
        adascale.zero_grad()  # the step is not taken
        found = adascale.gains.whole.state_dict()
        assert found | {"scale_invariant_steps": 0} == saved | {"scale_invariant_steps": 0}
    train(model, adascale, task(2), 2)
    assert adascale.gains.whole.estimates == saved["estimates"] + 1


def test_a_sum_of_losses_is_noticed() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=4)
    sum((loss_of(model, batch) / 4 for batch in task(4)), torch.zeros(())).backward()
    with pytest.warns(UserWarning, match="saw 1 backward passes before a step, and accumulation is 4.*summed"):
        adascale.step()
    assert adascale.gain == 1.0


def test_more_backward_passes_than_batches_are_noticed() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=2)
    for batch in task(6):
        (loss_of(model, batch) / 2).backward()
    with pytest.warns(UserWarning, match="saw 6 backward passes before a step, and accumulation is 2. .* too high"):
        adascale.step()


def test_the_short_step_at_the_end_of_an_epoch_counts_for_what_it_has() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=4)
    train(model, adascale, task(4), 4)
    local, mean = norms([gradient(model, batch) for batch in task(2, seed=5)])
    expected = AdaScaleGain(4)
    expected.load_state_dict(adascale.gains.whole.state_dict())
    expected.scale = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, adascale, task(2, seed=5), 4)
    assert adascale.gain == pytest.approx(expected.update(local, mean), rel=1e-4)
    assert adascale.gain <= 2
    adascale.interval = 3
    train(model, adascale, task(4), 4)
    assert adascale.gains.whole.scale == 4, "also where no norms are taken"
    less = AdaScale(sgd(model), scale=2.0, accumulation=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, less, task(1), 4)
    assert less.gains.whole.scale == 1, "one gradient of four is no half of a step"


def test_norms_may_be_taken_in_every_third_step_only() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=2, interval=3)
    counts = []
    for step in range(7):
        train(model, adascale, task(2, seed=step), 2)
        counts.append(adascale.gains.whole.estimates)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    assert 7 < adascale.scale_invariant_steps <= 14


def test_differences_are_of_gradients_without_their_loss_scale() -> None:
    weight = Parameter(torch.zeros(2))
    differences = Differences([[weight]], plain_norm)
    for gradient, squares, mean in (([2.0, 4.0], 0.0, 0.0), ([6.0, 8.0], 1.0 + 4.0 + 9.0 + 16.0, 4.0 + 9.0)):
        weight.grad = torch.tensor(gradient)
        assert differences.square_norms(0.5) == ([pytest.approx(squares)], [pytest.approx(mean)])


def test_differences_of_consecutive_gradients_estimate_the_noise_of_one_worker() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    adascale = AdaScale(optimizer, scale=8, estimator="differences", smoothing=0.999)
    for _ in range(3000):  # gradients of 8 batches with σ² = 50·8 each and |μ|² = 50/4
        (parameter * (0.5 + torch.randn(50))).sum().backward()
        adascale.step()
        adascale.zero_grad()
    assert adascale.gains.whole.variance == pytest.approx(400, rel=0.05)
    assert adascale.gains.whole.square_mean == pytest.approx(12.5, rel=0.15)
    assert adascale.gains.whole.estimates == 2999


@pytest.mark.parametrize("kind", [lambda m: sgd(m, momentum=0.9), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)])
@pytest.mark.parametrize("stop", [4, 32])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_run_that_was_resumed_goes_on_as_one_that_was_not(
    kind: Callable[[nn.Module], torch.optim.Optimizer], stop: int, interval: int
) -> None:
    """A process that goes back to a state may be in the midst of a step, of which no norms are taken or are to be."""
    batches = task(48)
    straight, model = small_model(), small_model()
    whole = AdaScale(kind(straight), accumulation=4, interval=interval)
    train(straight, whole, batches, 4)
    first = AdaScale(kind(model), accumulation=4, interval=interval)
    train(model, first, batches[:stop], 4)
    resumed = small_model()
    second = AdaScale(kind(resumed), accumulation=4, interval=interval)
    train(resumed, second, task(20, seed=7), 4)
    loss_of(resumed, batches[0]).backward()
    resumed.zero_grad()
    resumed.load_state_dict(model.state_dict())
    second.load_state_dict(first.state_dict())
    assert second.gain == first.gains.whole.gain
    train(resumed, second, batches[stop:], 4)
    assert second.scale_invariant_steps == whole.scale_invariant_steps and second.gain == whole.gain > 1
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_scale_may_be_another_after_a_resumption() -> None:
    model = small_model()
    adascale = AdaScale(sgd(model), accumulation=8)
    train(model, adascale, task(32), 8)
    more = AdaScale(sgd(model), accumulation=16)
    more.load_state_dict(adascale.state_dict())
    assert more.scale == 16 and more.gain > adascale.gains.whole.gain
    assert more.noise_scale == adascale.noise_scale
    more.set_scale(accumulation=8)
    assert more.gain == adascale.gains.whole.gain


def test_a_schedule_of_scale_invariant_steps_is_the_single_batch_runs() -> None:
    model = small_model()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    adascale = AdaScale(optimizer, accumulation=4)
    steps = 0
    while adascale.scale_invariant_steps < 10:
        train(model, adascale, task(4, seed=steps), 4)
        while schedule.last_epoch < int(adascale.scale_invariant_steps):
            schedule.step()
        steps += 1
    assert steps < 10
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / (1 + int(adascale.scale_invariant_steps)))


def test_a_closure_is_called_once() -> None:
    model, calls = small_model(), []
    adascale = AdaScale(sgd(model), scale=1)

    def closure() -> Tensor:
        calls.append(1)
        adascale.zero_grad()
        loss = loss_of(model, task(1)[0])
        loss.backward()
        return loss

    assert isinstance(adascale.step(closure), Tensor) and calls == [1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scale": 0.5, "accumulation": 2}, r"scale is 0\.5; it must be at least 1"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"accumulation": 2, "interval": 0}, "interval is 0"),
        ({"scale": 2, "interval": 2, "estimator": "differences"}, "interval is 2.*1 for differences"),
        ({}, "this step has one"),
        ({"scale": 8}, "this step has one"),
    ],
)
def test_settings_that_cannot_work_are_one_clear_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        AdaScale(sgd(small_model()), **wrong)
    assert "\n" not in str(caught.value)


def test_the_example_of_the_document_runs() -> None:
    text = (ROOT / "docs" / "adascale.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert 125 <= names["adascale"].steps < 500


def test_adams_rule_needs_adams_state() -> None:
    model = small_model()
    adascale = AdaScale(torch.optim.Adagrad(model.parameters()), accumulation=2, adaptive=True)
    with pytest.raises(ConfigurationError, match="Adagrad keeps no exp_avg_sq"):
        train(model, adascale, task(14), 2)


@pytest.mark.parametrize("partitioned", [False, True])
def test_norms_of_parts_are_those_of_the_whole_gradient(monkeypatch: pytest.MonkeyPatch, partitioned: bool) -> None:
    """Of two ranks, each has the whole mean gradient, or half of it."""
    parameter, whole = torch.zeros(4), torch.tensor([1.0, -2.0, 1.0, -2.0])
    monkeypatch.setattr(step_norms.dist, "all_reduce", lambda numbers, group: numbers.mul_(2))  # both have the same
    reduced = [[whole[:2] if partitioned else whole]]
    meter = StepNormMeter([[parameter]], plain_norm, 2, None, lambda: reduced, partitioned)
    assert meter.all_reduce(1.0, 1.0).mean == pytest.approx([10.0])


@pytest.mark.parametrize(
    "measure", [lambda it, in_it: it.measure(in_gradients=in_it), lambda it, in_it: it.measure_sums(9.0, 1 / in_it)]
)
def test_differences_are_of_gradients_without_the_factor_that_is_in_them(measure: Any) -> None:
    found = []
    for factor in (1.0, 4.0):
        weight = Parameter(torch.zeros(2))
        adascale = AdaScale(torch.optim.SGD([weight], lr=0.0), scale=2, estimator="differences")
        for gradient in ([2.0, 4.0], [6.0, 9.0]):
            weight.grad = factor * torch.tensor(gradient)
            measure(adascale, factor)
            adascale.advance()
        found.append((adascale.gains.whole.variance, adascale.gains.whole.square_mean))
    assert found[0] == pytest.approx(found[1]) and found[0][0] > 1.0
