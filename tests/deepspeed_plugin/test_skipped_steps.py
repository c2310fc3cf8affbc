"""Steps whose gradient has NaN or Inf, in DeepSpeed's synchronous methods and in local SGD, and what a step leaves."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.deepspeed_plugin.engines import adascale
from fairseq_async.deepspeed_plugin.engines.adascale import AdaScaleEngine
from fairseq_async.deepspeed_plugin.engines.local_sgd import LocalEngine
from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine
from fairseq_async.errors import AsyncError


class Engine(SynchronousEngine):
    """What counting skipped steps needs of DeepSpeed's engine."""

    def __init__(self, **optimizer: Any) -> None:
        self.optimizer = SimpleNamespace(**optimizer)
        self.global_steps = self.skipped_steps = self.global_samples = self._skipped_in_a_row = self.cleared = 0
        self.is_managed, self._unmanaged_backward_count = True, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def fp16_enabled(self) -> bool:
        return False

    def train_batch_size(self) -> int:
        return 8

    def gradient_accumulation_steps(self) -> int:
        return 2

    def managed_gradient_accumulation(self) -> bool:
        return self.is_managed

    def steps_per_print(self) -> None:
        """Prints no progress."""

    def zero_grad(self) -> None:
        self.cleared += 1


def test_a_bad_step_counts_as_skipped_and_leaves_no_gradient() -> None:
    engine = Engine()
    assert not engine._skip_step(False) and engine.cleared == 0
    assert engine._skip_step(True)
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.cleared) == (1, 1, 8, 1)
    assert engine.progress == 0 and not engine._step_applied
    engine.is_managed, engine._unmanaged_backward_count = False, 3  # micro-batches in the script's own step
    engine._skip_step(True)
    assert (engine.global_samples, engine._unmanaged_backward_count) == (8 + 3 * 4, 0)


def test_an_optimizer_that_looks_for_nan_itself_skips_by_itself() -> None:
    engine = Engine(bit16_groups=[[]])
    assert not engine._skip_step(True) and engine.global_steps == engine.cleared == 0


def test_ten_bad_steps_in_a_row_end_the_run_and_nine_with_a_good_one_between_do_not() -> None:
    engine = Engine()
    for bad in [*[True] * 9, False] * 3:
        assert engine._skip_step(bad) == bad
    with pytest.raises(AsyncError, match="the gradients of the last 10 steps had NaN or Inf"):
        for _ in range(10):
            engine._skip_step(True)


@pytest.mark.parametrize(("fp16", "scale", "counts"), [(False, 1.0, True), (False, 2.0, False), (True, 1.0, False)])
def test_bad_steps_count_where_no_loss_scale_is_still_to_fall(
    monkeypatch: pytest.MonkeyPatch, fp16: bool, scale: float, counts: bool
) -> None:
    """DeepSpeed itself ends a run in fp16 whose scale can fall no further."""
    monkeypatch.setattr("fairseq_async.deepspeed_plugin.compat.loss_scale_of", lambda engine: scale)
    monkeypatch.setattr(Engine, "fp16_enabled", lambda engine: fp16)
    local: Any = Engine()
    local.loop = MagicMock()
    monkeypatch.setattr(Engine, "was_step_applied", lambda engine: False, raising=False)
    monkeypatch.setattr(Engine, "_set_learning_rates", lambda engine: None, raising=False)
    LocalEngine._end_step(local)
    assert local.loop.count_left_out.mock_calls == [call(True)] * counts
    engine = Engine()
    with pytest.raises(AsyncError, match="the last 10 steps had NaN or Inf") if counts else nullcontext():
        for _ in range(10):
            engine._skip_step(True)


class Scaled(AdaScaleEngine):
    """What a step of AdaScale needs of DeepSpeed's engine, which notes what is called."""

    def __init__(self, applied: bool = True) -> None:
        self.calls: list[object] = []
        self.applied, self.lr_scheduler, self.device = applied, "schedule", "cpu"
        self.monitor = SimpleNamespace(enabled=False)
        self.adascale: Any = SimpleNamespace(
            measure=lambda loss_scale, in_gradients: self.calls.append(("measure", loss_scale, in_gradients)),
            discard_norms=lambda: self.calls.append("discard"),
            advance=lambda: self.calls.append("advance"),
            scaled_learning_rate=nullcontext,
            load_statistics=self.calls.append,
            scale_invariant_steps=7.5,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def was_step_applied(self) -> bool:
        return self.applied

    def _skip_step(self, bad: bool) -> bool:
        return bad


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """DeepSpeed's part of an engine: whether its gradient is finite, and what it was told."""
    noted: list[object] = [True]
    monkeypatch.setattr(adascale, "loss_scale_of", lambda engine: 4.0)
    monkeypatch.setattr(adascale, "on_any_rank", lambda flag, device: flag)
    monkeypatch.setattr(adascale, "set_schedule", lambda schedule, progress: noted.append((schedule, progress)))
    monkeypatch.setattr(adascale.tensors, "step_gradients", lambda engine: [])
    monkeypatch.setattr(adascale.tensors, "all_finite", lambda gradients: noted[0])
    monkeypatch.setattr(SynchronousEngine, "_take_model_step", lambda self, kwargs: self.calls.append("step"))
    return noted


@pytest.mark.parametrize(
    ("finite", "applied", "calls"),
    [(True, True, ["step", "advance"]), (True, False, ["step", "discard"]), (False, True, ["discard"])],
    ids=["taken", "skipped by the optimizer", "skipped by all ranks"],
)
def test_the_norms_of_a_step_that_was_not_taken_are_in_no_gain(
    steps: list[object], finite: bool, applied: bool, calls: list[object]
) -> None:
    engine, steps[0] = Scaled(applied), finite
    engine._take_model_step(None)
    assert engine.calls == [("measure", 4.0, 4.0), *calls]
    assert steps[1:] == [("schedule", 7.5)] * finite


@pytest.mark.parametrize(("path", "module_only"), [("step-3", False), ("step-3", True), (None, False)])
def test_a_checkpoint_brings_the_gain_and_its_schedule_unless_the_module_alone_is_loaded(
    steps: list[object], monkeypatch: pytest.MonkeyPatch, path: str | None, module_only: bool
) -> None:
    loaded = path, {"fairseq_async.adascale": "statistics"}
    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", lambda self, *args: loaded)
    monkeypatch.setattr(SynchronousEngine, "_check_equal", lambda self: None)
    engine, restores = Scaled(), path is not None and not module_only
    assert engine.load_checkpoint("directory", load_module_only=module_only) == loaded
    assert engine.calls == ["statistics"] * restores and steps[1:] == [("schedule", 7.5)] * restores


def test_a_loss_scale_falls_to_its_least_and_then_lets_gradients_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    section = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 2}
    scale = LossScale(section)
    assert [scale.skips(finite) for finite in (False, False, True)] == [True, False, False]
    assert scale.value == 2.0
    before = scale.state_dict()
    assert not scale.skips(False) and scale.state_dict() == before, "at the least, a NaN says nothing about the scale"
    resumed = LossScale(section)
    resumed.load_state_dict(scale.state_dict())
    for each in (scale, resumed):
        assert [each.skips(True) for _ in range(3)] == [False] * 3 and each.value > 2.0
    assert scale.state_dict() == resumed.state_dict()
    patient, other = (LossScale(section | {"hysteresis": 2, "min_loss_scale": 1}) for _ in range(2))
    patient.skips(False)
    other.load_state_dict(patient.state_dict())
    for each in (patient, other):
        assert each.skips(False) and each.value == 2.0, "it falls with the second"


@pytest.mark.parametrize(("refills", "value"), [(True, 16.0), (False, 8.0)])
def test_a_good_step_gives_a_loss_scale_its_patience_back_where_the_configuration_says_so(
    monkeypatch: pytest.MonkeyPatch, refills: bool, value: float
) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    scale = LossScale({"enabled": True, "initial_scale_power": 4, "hysteresis": 2, "consecutive_hysteresis": refills})
    assert [scale.skips(finite) for finite in (False, True, False)] == [True, False, True]
    assert scale.value == value


@pytest.mark.parametrize(("section", "value"), [(None, 1.0), ({"enabled": True, "loss_scale": 8}, 8.0)])
def test_a_loss_scale_that_is_fixed_stays(section: dict[str, Any] | None, value: float) -> None:
    scale = LossScale(section)
    assert not scale.skips(False) and not scale.skips(True) and scale.value == value
