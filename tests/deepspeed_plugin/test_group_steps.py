"""What the engines of Adasum and AdaScale do on one rank in one step, without the other ranks."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Rprop

from fairseq_async.deepspeed_plugin.engines import adascale, adasum, synchronous
from fairseq_async.deepspeed_plugin.engines.adascale import AdaScaleEngine
from fairseq_async.deepspeed_plugin.engines.adasum import AdasumEngine
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine
from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import AdaScaleOptions, AdasumOptions
from fairseq_async.worker.replica import TensorReplica
from tests.helpers.bare_engines import bare


@pytest.mark.parametrize("form", ["gradient", "delta"])
@pytest.mark.parametrize(("bad", "skips"), [(False, False), (True, True), (True, False)])
def test_gradients_are_combined_before_a_step_or_its_changes_after_it(
    monkeypatch: pytest.MonkeyPatch, form: str, bad: bool, skips: bool
) -> None:
    """Where an optimizer looks for NaN by itself, it skips the step on all ranks: all have one then."""
    did, gradients = list[Any](), [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]

    def combine(given: list[Tensor]) -> None:
        did.append("combines")
        given[0].mul_(math.inf if bad else 2.0)

    engine = bare(AdasumEngine, form=form, _combine=combine)

    def skip(found: bool) -> bool:
        did.append(found)
        return skips

    vars(engine)["_skip_step"] = skip
    vars(engine)["_step_and_combine"] = lambda *given: did.append(given)
    monkeypatch.setattr(adasum.tensors, "step_gradients", lambda engine: gradients)
    monkeypatch.setattr(adasum, "on_any_rank", lambda flag, device: bad)
    monkeypatch.setattr(SynchronousEngine, "_take_model_step", lambda engine, given: did.append(("steps", given)))
    engine._take_model_step("given")
    steps = [("steps", "given")] if form == "gradient" or bad else [("given", torch.device("cpu"))]
    assert did == [*["combines"] * (form == "gradient"), bad, *steps * (not skips)]
    if form == "delta":
        assert gradients[0].isnan().all() if bad else gradients[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("clip", "moved"), [(0.0, [1.5, 2.0]), (1.0, [0.6, 0.8]), (10.0, [1.5, 2.0])])
@pytest.mark.parametrize(("every", "steps", "averages"), [(3, 6, True), (3, 7, False), (0, 6, False)])
def test_the_ranks_changes_together_replace_this_ones(
    monkeypatch: pytest.MonkeyPatch, clip: float, moved: list[float], every: int, steps: int, averages: bool
) -> None:
    weight, averaged = Parameter(torch.tensor([10.0, 20.0])), list[object]()
    options = SimpleNamespace(clip_delta=clip, sync_state=every)
    engine = bare(AdasumEngine, options=options, global_steps=steps, _replica=TensorReplica([("weight", weight)]))
    engine._combine = lambda changes: [change.mul_(0.5) for change in changes]
    engine._states = SimpleNamespace(average=averaged.append)

    @torch.no_grad()
    def step(engine: object, given: object) -> None:
        weight.sub_(torch.tensor([3.0, 4.0]))

    monkeypatch.setattr(SynchronousEngine, "_take_model_step", step)
    engine._step_and_combine(None, torch.device("cpu"))
    assert weight.tolist() == pytest.approx([10.0 - moved[0], 20.0 - moved[1]])
    assert averaged == [None] * averages


@pytest.mark.parametrize(
    ("kind", "given", "form"), [(SGD, "auto", "gradient"), (AdamW, "auto", "delta"), (AdamW, "gradient", "gradient")]
)
@pytest.mark.parametrize("hierarchy", ["node", "flat"])
def test_adasum_is_of_what_the_optimizer_and_the_options_say(
    monkeypatch: pytest.MonkeyPatch, kind: Any, given: str, form: str, hierarchy: str
) -> None:
    monkeypatch.setattr(AdasumEngine, "set_up_group", lambda engine, options: setattr(engine, "options", options))
    monkeypatch.setattr(adasum, "NodeAdasum", lambda device: ("node", device))
    monkeypatch.setattr(adasum, "DistributedAdasum", lambda: ("flat",))
    monkeypatch.setattr(adasum.tensors, "replica_of", lambda engine, rank: ("replica", rank))
    monkeypatch.setattr(adasum.tensors, "unstepped", lambda engine: "unstepped")
    optimizer = kind([Parameter(torch.zeros(1))], lr=0.1)
    engine = bare(AdasumEngine, basic_optimizer=optimizer, device="cpu")
    engine.set_up(AdasumOptions(method="adasum", form=given, **({"hierarchy": "node"} if hierarchy == "node" else {})))
    assert engine.form == form and engine._states.optimizer is optimizer
    assert engine._combine == (("node", torch.device("cpu")) if hierarchy == "node" else ("flat",))
    assert (engine._replica, engine._unstepped) == (("replica", 0), "unstepped")


@pytest.mark.parametrize("tag", [None, "best"])
def test_each_rank_of_adasum_saves_in_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tag: str | None) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", lambda engine, *given, **named: (given, named))
    engine = bare(AdasumEngine, worker=2, global_steps=7)
    found = engine.save_checkpoint("run", tag, "state", save_latest=False)
    assert found == (("run/worker-2", tag or "global_step7", "state"), {"save_latest": False})


@pytest.mark.parametrize("masters", [None, {"a": 1}])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("parts", [False, True])
def test_adascale_measures_as_the_optimizer_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch, masters: Any, kind: Any, parts: bool
) -> None:
    """Three ranks with five micro-batches each."""
    monkeypatch.setattr(AdaScaleEngine, "set_up_group", lambda engine, options: None)
    monkeypatch.setattr(AdaScaleEngine, "gradient_accumulation_steps", lambda engine: 5)
    monkeypatch.setattr(adascale.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(adascale.tensors, "masters_of", lambda optimizer: masters)
    monkeypatch.setattr(adascale, "keeps_parts_of_gradients", lambda optimizer: parts)
    monkeypatch.setattr(adascale, "optimizer_gradients", lambda optimizer: ("gradients of", optimizer))
    monkeypatch.setattr(adascale, "AdaScale", lambda *given, **named: (given, named))
    optimizer = kind([Parameter(torch.zeros(1))], lr=0.1)
    engine = bare(AdaScaleEngine, basic_optimizer=optimizer, optimizer="wrapper", lr_scheduler=None)
    engine.set_up(AdaScaleOptions(method="adascale", smoothing=0.75, interval=4))
    given, named = engine.adascale
    assert given == (optimizer, 15.0, 5)
    reduced, adam = named.pop("reduced"), kind is AdamW
    assert (None if reduced is None else reduced()) == (None if masters is None else ("gradients of", "wrapper"))
    assert named == {
        "estimator": AdaScaleOptions(method="adascale").estimator,
        "adaptive": adam,
        "smoothing": 0.75,
        "interval": 4,
        "masters": masters,
        "preconditioned": adam and masters is None,
        "partitioned": parts,
    }
    monkeypatch.setattr(AdaScaleEngine, "gradient_accumulation_steps", lambda engine: 1)
    monkeypatch.setattr(adascale.dist, "get_world_size", lambda: 1)
    differences = AdaScaleOptions(method="adascale", estimator="differences", scale=4)
    with pytest.raises(ConfigurationError, match="is for fp32 without ZeRO") if masters else nullcontext():
        engine.set_up(differences)
    engine.basic_optimizer = Rprop([Parameter(torch.zeros(1))])
    with pytest.raises(ConfigurationError, match="the optimizer is rprop"):
        engine.set_up(AdaScaleOptions(method="adascale"))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_monitor_has_the_gain_and_what_is_finite_of_what_it_is_made_of(enabled: bool) -> None:
    written = list[object]()
    figures = {"noise_scale": math.inf, "variance": 2.5, "square_mean": 0.5, "scale_invariant_steps": 7.5}
    gains = SimpleNamespace(gains=SimpleNamespace(whole=SimpleNamespace(**figures)), gain=1.5)
    monitor = SimpleNamespace(enabled=enabled, write_events=written.append)
    bare(AdaScaleEngine, monitor=monitor, adascale=gains, global_samples=48)._log()
    values = {"gain": 1.5, "variance": 2.5, "square_mean": 0.5, "scale_invariant_steps": 7.5}
    assert written == [[(f"AdaScale/{name}", value, 48) for name, value in values.items()]] * enabled


def test_a_checkpoint_has_what_adascale_has_measured_beside_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", lambda engine, *given, **named: (given, named))
    engine = bare(AdaScaleEngine, adascale=SimpleNamespace(statistics=lambda: "statistics"))
    own = {"fairseq_async.adascale": "statistics"}
    assert engine.save_checkpoint("run") == (("run", None, own), {})
    found = engine.save_checkpoint("run", "tag", {"epoch": 3}, save_latest=False)
    assert found == (("run", "tag", own | {"epoch": 3}), {"save_latest": False})


@pytest.mark.parametrize(("total", "steps", "finished"), [(4, 9, True), (5, 9, False), (3, 9, True), (0, 9, False)])
def test_a_run_of_a_group_ends_after_its_steps_without_those_that_were_skipped(
    total: int, steps: int, finished: bool
) -> None:
    options = SimpleNamespace(total_steps=total)
    engine = bare(SynchronousEngine, options=options, global_steps=steps, skipped_steps=5)
    assert (engine.progress, engine.finished) == (4, finished)


def test_an_engine_of_a_group_is_one_rank_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Any]()
    monkeypatch.setattr(synchronous.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(synchronous.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(synchronous, "refuse_other_steps", lambda *each: given.extend(each))
    monkeypatch.setattr(synchronous, "check_overflow_always", lambda optimizer: given.append(optimizer))
    monkeypatch.setattr(synchronous, "check_equal", lambda named: given.append([name for name, _ in named]))
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    engine = bare(SynchronousEngine, optimizer="wrapper", global_steps=9, skipped_steps=4)
    vars(engine)["module"] = model
    engine.set_up_group(AdasumOptions(method="adasum", total_steps=6))
    of, workers, is_expected, *rest = given
    assert (of, workers, rest) == (engine, 3, ["wrapper", ["weight", "bias"]])
    assert (engine.worker, engine.workers, engine.context.worker, engine.context.workers) == (2, 3, 2, 3)
    assert (engine._skipped_in_a_row, engine._takes_step, is_expected(engine)) == (0, False, False)
    engine._takes_step = True
    assert is_expected(engine)
    engine._takes_step, engine.global_steps = False, 10
    assert is_expected(engine), "after the end"


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_group_refreshes_masters_of_a_checkpoint_without_its_optimizer(
    monkeypatch: pytest.MonkeyPatch, optimizer: bool
) -> None:
    did, given = list[Any](), ("run", "tag", False, optimizer, "rates", False, "own")

    def load(engine: object, *each: object) -> tuple[None, dict[str, Any]]:
        did.append(each)
        return None, {}

    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", load)
    monkeypatch.setattr(synchronous, "refresh_masters", lambda engine: did.append("refreshes"))
    engine = bare(SynchronousEngine)
    vars(engine)["_check_equal"] = lambda: did.append("checks")
    assert engine.load_checkpoint(*given) == (None, {})
    assert did == [given, *["refreshes"] * (not optimizer), "checks"]
