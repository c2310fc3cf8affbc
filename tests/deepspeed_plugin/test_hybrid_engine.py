"""What the engine of hybrid_async does in one step and around it, in which order and with which figures."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from fairseq_async.deepspeed_plugin import server
from fairseq_async.deepspeed_plugin.engines import hybrid
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.hybrid import HybridEngine
from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.engines.masters_in_server import show_scale
from fairseq_async.deepspeed_plugin.engines.zero3 import ShownGroups
from fairseq_async.deepspeed_plugin.schedules import FollowedSchedule, NamedSchedule
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import MethodSpec
from fairseq_async.pytorch.brought_state import StateInServer
from fairseq_async.server.optimizers.learning_rates import RateTable, present_options, present_rates
from fairseq_async.server.optimizers.torch_optimizer import describe
from tests.helpers.bare_engines import bare, noting

SAMPLES = 24


class Stepping(HybridEngine):
    """Of DeepSpeed's engine and of the worker, what a step asks of them; notes it in the order in which it is asked."""

    def __init__(self, section: dict[str, Any] | None, gradient: list[float] | None, refused: int = 0) -> None:
        nn.Module.__init__(self)
        self.did, self.weight = list[object](), Parameter(torch.zeros(2))
        self.weight.grad = None if gradient is None else torch.tensor(gradient)
        self.loss_scaler, self.optimizer, self._loss = (
            LossScale(section),
            cast(Any, SimpleNamespace()),
            torch.tensor(0.75),
        )
        self.skipped_steps, self._has_gradient = 5, True
        refusals = SimpleNamespace(total=3)

        def step(*given: object) -> None:
            self.did.append(("step", *given))
            refusals.total += refused

        worker = {"refusals": refusals, "step": step, "write_ahead": lambda factor: self.did.append(("ahead", factor))}
        self.async_worker = cast(Any, SimpleNamespace(**worker, finished=False))
        self.loop = cast(Any, SimpleNamespace(**{name: self._note(name) for name in ("slowed_down", "begin_step")}))

    def _note(self, name: str) -> Any:
        return lambda *_: self.did.append(name)

    def train_batch_size(self) -> int:
        return SAMPLES


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(name: str) -> Any:
        return lambda engine, *given, **others: engine.did.append(
            (name, *given, *others.values()) if given or others else name
        )

    for name in ("_check_followed", "_check_rates", "_check_trained", "_check_share"):
        monkeypatch.setattr(Stepping, name, note(name))
    for name in ("_set_learning_rates", "zero_grad", "_log", "_skip_step", "_skip_without_gradient"):
        monkeypatch.setattr(Stepping, name, note(name))
    monkeypatch.setattr(hybrid, "trainable", lambda engine: [("weight", engine.weight)])
    monkeypatch.setattr(hybrid, "norm_of_parts", lambda gradients: 10 * float(torch.cat(gradients).norm()))
    for name in ("drop_partitions", "count_step"):
        monkeypatch.setattr(hybrid, name, note(name))
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)


CHECKS = ["_check_followed", "_check_rates", "_check_trained"]


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("divided", [False, True])
def test_a_step_sends_the_gradient_without_its_loss_scale_and_counts_as_the_server_answers(
    refused: int, divided: bool
) -> None:
    """In ZeRO 3 the gradients are this rank's parts, whose norm the ranks find together."""
    engine = Stepping({"enabled": True, "loss_scale": 8}, [24.0, 32.0], refused)
    if divided:
        engine.divided = cast(Any, SimpleNamespace(gradients=lambda: [torch.tensor([2.4]), torch.tensor([3.2])]))
    engine._take_model_step(None)
    applied = not refused
    assert engine.did == [
        *CHECKS,
        "_check_share",
        "slowed_down",
        ("ahead", 0.125),
        ("step", SAMPLES, 0.75, pytest.approx(5.0), 0.125),
        "_set_learning_rates",
        "drop_partitions",
        "zero_grad",
        ("count_step", applied),
        "begin_step",
        "_log",
    ]
    assert engine.skipped_steps == 5 + refused and not engine._has_gradient
    assert engine.get_global_grad_norm() == pytest.approx(5.0)
    assert vars(engine.optimizer) == ({} if divided else {"cur_scale": 8.0, "loss_scale": 8.0, "overflow": False})


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("power", [4, 0])
def test_a_step_that_overflows_is_skipped_while_the_loss_scale_can_fall(power: int) -> None:
    """At the least one, the server refuses the step, and counts it."""
    engine = Stepping({"enabled": True, "initial_scale_power": power, "hysteresis": 1}, [1.0, math.inf])
    engine._take_model_step(None)
    after, sent = max(2.0**power / 2, 1.0), ("step", SAMPLES, 0.75, math.inf, 1.0)
    assert vars(engine.optimizer) == {"cur_scale": after, "loss_scale": after, "overflow": True}
    assert ("_skip_step" in engine.did, sent in engine.did) == ((True, False) if power else (False, True))


@pytest.mark.usefixtures("noted")
def test_a_step_of_gradients_that_a_script_has_set_has_no_loss() -> None:
    engine = Stepping(None, [3.0, 4.0])
    engine._loss = None
    engine._take_model_step(None)
    assert ("step", SAMPLES, None, 5.0, 1.0) in engine.did


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("case", ["none", "of an earlier step", "after the end"])
def test_a_step_without_a_gradient_or_after_the_end_sends_nothing(case: str) -> None:
    engine = Stepping(None, None)
    if case == "of an earlier step":  # ZeRO 3 has partitions of zeros then
        engine.divided, engine._has_gradient = cast(Any, SimpleNamespace(gradients=lambda: [torch.zeros(1)])), False
    engine.async_worker.finished = engine._warned_of_end = case == "after the end"
    engine._take_model_step(None)
    assert engine.did == (["_skip_step"] if case == "after the end" else [*CHECKS, "_skip_without_gradient"])


def test_the_batch_of_a_step_is_this_workers_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with three samples each in a micro-batch, of which a step has five on average."""
    monkeypatch.setattr(DeepSpeedEngine, "gradient_accumulation_steps", lambda engine: 5)
    monkeypatch.setattr(DeepSpeedEngine, "train_batch_size", lambda engine: 30)
    engine = bare(HybridEngine)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (5, 30)
    engine._share = 7
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (7, 42)


@pytest.mark.parametrize("by_script", [False, True])
def test_a_gradient_ends_with_the_last_micro_batch_of_the_share_or_where_the_script_says(
    monkeypatch: pytest.MonkeyPatch, by_script: bool
) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "is_gradient_accumulation_boundary", lambda engine: engine.micro_steps == 11)
    monkeypatch.setattr(hybrid, "manages_accumulation", lambda engine: not by_script)
    engine, found = bare(HybridEngine, _share=3, _first=10, _is_gradient_accumulation_boundary=None), list[int]()
    for engine.micro_steps in range(10, 15):
        found += [engine.micro_steps] * engine.is_gradient_accumulation_boundary()
    assert found == ([11] if by_script else [12, 13, 14])
    for engine._share, engine._is_gradient_accumulation_boundary in ((0, None), (3, False)):
        for engine.micro_steps in (11, 13):
            assert engine.is_gradient_accumulation_boundary() == (engine.micro_steps == 11)


@pytest.mark.parametrize("managed", [False, True])
def test_a_script_that_ends_steps_by_itself_has_to_know_the_share(
    monkeypatch: pytest.MonkeyPatch, managed: bool
) -> None:
    """A Trainer's may have become smaller since the step began."""
    monkeypatch.setattr(hybrid, "manages_accumulation", lambda engine: managed)
    engine = bare(HybridEngine, _share=6, _passes=4, async_worker=SimpleNamespace(micro_batches=4))
    engine._is_gradient_accumulation_boundary = None
    engine._check_share()
    assert engine._share == (6 if managed else 4)
    engine._passes = 5
    if managed:
        return engine._check_share()
    with pytest.raises(ConfigurationError, match="a step after 5 micro-batches, of which it has 4 by"):
        engine._check_share()
    engine._share = 0
    engine._check_share()


def test_a_share_begins_after_a_step_and_not_after_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun = bare(HybridEngine, global_steps=3), list[int]()
    monkeypatch.setattr(HybridEngine, "_begin_share", lambda engine: begun.append(engine.global_steps))
    for steps in (3, 4):
        monkeypatch.setattr(AsyncEngine, "step", lambda engine, given, now=steps: setattr(engine, "global_steps", now))
        engine.step()
    assert begun == [4]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_backward_is_of_the_loss_times_its_scale_and_the_log_has_the_loss(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    passes = list[object]()

    def backward(engine: Any, loss: torch.Tensor, *given: object, **others: object) -> str:
        passes.append((float(loss.detach()), given, others))
        engine._loss = loss.detach().clone()
        return "DeepSpeed's"

    monkeypatch.setattr(AsyncEngine, "backward", backward)
    engine = bare(HybridEngine, loss_scaler=LossScale({"enabled": True, "loss_scale": scale}))
    loss = torch.tensor(0.5, requires_grad=True)
    returned = engine.backward(loss, "given", retain_graph=True)
    assert passes == [(0.5 * scale, ("given",), {"retain_graph": True})]
    assert not engine._loss.requires_grad
    with torch.no_grad():
        loss.fill_(9.0)  # as the next step does with CUDA graphs
    assert float(engine._loss) == 0.5
    assert returned == "DeepSpeed's" if scale == 1.0 else returned is loss


@pytest.mark.parametrize(
    ("running", "supported", "refused"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_backward_of_a_loss_is_one_line_where_deepspeed_has_none_of_its_optimizers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], running: bool, supported: bool, refused: bool
) -> None:
    def begin(engine: object) -> None:
        raise RuntimeError("of stage 0")

    monkeypatch.setattr(DeepSpeedEngine, "_backward_prologue", begin)
    engine = bare(HybridEngine, _running_engine_backward=running, _support_torch_style_backward=supported)
    with pytest.raises(SystemExit if refused else RuntimeError):
        engine._backward_prologue()
    assert ("error: loss.backward() on a loss of the engine" in capsys.readouterr().err) == refused
    begun = list[object]()
    monkeypatch.setattr(DeepSpeedEngine, "_backward_prologue", lambda engine: begun.append(engine))
    engine._backward_prologue()
    assert begun == [engine]


def test_each_backward_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "_backward_epilogue", lambda engine: setattr(engine, "did", engine._passes))
    engine = bare(HybridEngine, _passes=4)
    engine._backward_epilogue()
    assert (engine._passes, engine._has_gradient, engine.did) == (5, True, 5)


@pytest.mark.parametrize(
    ("ends", "divided", "fills"), [(True, None, True), (False, None, False), (True, "parts", False)]
)
def test_parameters_without_a_gradient_get_zeros_before_ranks_reduce_a_whole_gradient(
    monkeypatch: pytest.MonkeyPatch, ends: bool, divided: object, fills: bool
) -> None:
    did = list[object]()
    monkeypatch.setattr(HybridEngine, "is_gradient_accumulation_boundary", lambda engine: ends)
    monkeypatch.setattr(hybrid, "fill_gradients", lambda engine: did.append("fills"))
    monkeypatch.setattr(DeepSpeedEngine, "allreduce_gradients", lambda engine, *given: did.append(given))
    bare(HybridEngine, divided=divided).allreduce_gradients(7)
    assert did == [*["fills"] * fills, (7,)]


@pytest.mark.parametrize("divided", [None, "parts"])
def test_the_gradients_of_several_passes_are_reduced_once(monkeypatch: pytest.MonkeyPatch, divided: object) -> None:
    did = list[str]()

    def around(name: str) -> Callable[..., Any]:
        @contextmanager
        def enter(engine: object) -> Any:
            did.append(f"begins {name}")
            yield
            did.append(f"ends {name}")

        return enter

    for name in ("coalesce_grad_reduction", "no_sync"):
        monkeypatch.setattr(DeepSpeedEngine, name, around(name), raising=False)
    monkeypatch.setattr(HybridEngine, "allreduce_gradients", lambda engine: did.append("reduces"))
    with bare(HybridEngine, divided=divided).coalesce_grad_reduction():
        did.append("passes")
    of, reduces = ("coalesce_grad_reduction", []) if divided else ("no_sync", ["reduces"])
    assert did == [f"begins {of}", "passes", f"ends {of}", *reduces]


@pytest.mark.parametrize(
    "case", ["rate", "rate of a schedule", "option", "scale", "hook", "step", "state", "shown", "table"]
)
def test_whatever_a_script_changes_of_an_optimizer_in_the_server_is_one_line(case: str) -> None:
    served, own, basic = (SGD([Parameter(torch.zeros(1))], lr=0.5) for _ in range(3))
    LambdaLR(basic, lambda step: 1.0)  # which wraps its step()
    engine = bare(
        HybridEngine, optimizer=own, basic_optimizer=basic, _served=served, loss_scaler=LossScale(), lr_scheduler=None
    )
    served.state = engine._moments = StateInServer(dict)
    engine._shown = ShownGroups(own.param_groups, served.param_groups) if case == "shown" else None
    show_scale(own, engine.loss_scaler, overflow=False)
    engine._has_schedule, engine._schedule = case == "rate of a schedule", RateTable(served, [])
    if case == "table":
        factor = [1.0]
        engine.lr_scheduler = LambdaLR(served, lambda step: factor[0])
        engine._has_schedule, engine._schedule = True, RateTable(served, [[0.5], [0.5]])
    engine._rates, engine._options = present_rates(served), present_options(served)
    engine._check_rates()
    moments, schedule, engine._moments = engine._moments, engine._schedule, None  # before it has joined
    engine._schedule = NamedSchedule(served, WarmupLR(SGD([Parameter(torch.zeros(1))])))
    engine._check_rates()
    engine._moments, engine._schedule = moments, schedule
    changes: dict[str, tuple[Callable[[], object], str]] = {
        "rate": (lambda: served.param_groups[0].update(lr=0.25), "in the server: give a schedule as"),
        "rate of a schedule": (lambda: served.param_groups[0].update(lr=0.25), "in the server: leave it to the sch"),
        "option": (
            lambda: served.param_groups[0].update(weight_decay=0.25),
            r'"weight_decay"\] of the optimizer was 0',
        ),
        "scale": (lambda: setattr(own, "cur_scale", 2.0), "has set the loss scale of the optimizer"),
        "hook": (lambda: basic.register_step_post_hook(lambda *_: None), "the optimizer has a step hook"),
        "step": (lambda: setattr(basic, "step", lambda: None), r"or a step\(\) of the script's own"),
        "state": (lambda: setattr(served, "state", {}), "moments"),
        "shown": (lambda: own.param_groups[0].update(lr=0.25), "was 0.5 and is 0.25 now"),
        "table": (lambda: factor.__setitem__(0, 2.0), r"LambdaLR gives the learning rates \[1.0\] after 1 steps"),
    }
    change, said = changes[case]
    change()
    with pytest.raises(ConfigurationError, match=said):
        engine._check_rates()


@pytest.mark.parametrize("by_optimizer", [False, True])
def test_moments_of_plain_deepspeeds_masters_are_one_line_and_the_model_stays_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_optimizer: bool
) -> None:
    """DeepSpeed loads the optimizer only of an engine in fp32."""
    seen = list[object]()

    def load(engine: Any, *given: object) -> None:
        seen.append((engine.half_precision, given))
        SGD([Parameter(torch.zeros(1))]).load_state_dict({} if by_optimizer else cast(Any, {})["of the script's"])

    monkeypatch.setattr(AsyncEngine, "load_checkpoint", load)
    engine = bare(HybridEngine, half_precision=torch.bfloat16)
    with pytest.raises(SystemExit if by_optimizer else KeyError):
        engine.load_checkpoint("directory", "tag")
    assert seen == [(None, ("directory", "tag"))] and engine.half_precision is torch.bfloat16
    assert ("checkpoint is of plain DeepSpeed in half precision" in capsys.readouterr().err) == by_optimizer


@pytest.mark.parametrize("finished", [False, True])
def test_in_zero_3_a_checkpoint_is_loaded_after_the_run_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finished: bool
) -> None:
    accepted = list[object]()
    monkeypatch.setattr(AsyncEngine, "load_checkpoint", lambda engine, *given: (*given, *accepted))
    monkeypatch.setattr(hybrid, "accept_state", accepted.append)
    engine = bare(
        HybridEngine, divided="parts", optimizer="DeepSpeed's", async_worker=SimpleNamespace(finished=finished)
    )
    if finished:
        assert engine.load_checkpoint("directory") == ("directory", "DeepSpeed's")
        return
    with pytest.raises(SystemExit):
        engine.load_checkpoint("directory")
    assert '"stage": 3 with hybrid_async: load with "stage": 2' in capsys.readouterr().err


@pytest.mark.parametrize("kind", [None, torch.float16, torch.bfloat16])
def test_scripts_learn_in_which_type_the_model_computes(kind: torch.dtype | None) -> None:
    engine = bare(HybridEngine, half_precision=kind)
    assert engine.fp16_enabled() == (kind is torch.float16) and engine.bfloat16_enabled() == (kind is torch.bfloat16)


@pytest.mark.parametrize("scheduler", [False, True])
@pytest.mark.parametrize("changed", [None, "schedule", "option"])
@pytest.mark.parametrize("state", [None, Path("state")])
def test_a_worker_joins_with_the_optimizer_and_schedule_that_are_there(
    monkeypatch: pytest.MonkeyPatch, scheduler: bool, changed: str | None, state: Path | None
) -> None:
    """They may have been loaded since ``initialize``; a state of the server has the moments."""
    did, served = list[Any](), SGD([Parameter(torch.ones(1))], lr=0.5)
    framework = {"scheduler": {"type": "WarmupLR"}} if scheduler else {"optimizer": "SGD"}
    followed, details = {"begins_at": 0}, SimpleNamespace(moments="")
    engine = bare(
        HybridEngine,
        optimizer="wrapper",
        _served=served,
        lr_scheduler="schedule",
        async_worker=None,
        _began=dict(followed),
    )
    engine.spec = MethodSpec("hybrid_async", 3, {"total_steps": 40}, framework=framework)
    engine.async_worker, engine._options = SimpleNamespace(details=details), present_options(served)
    engine._followed = SimpleNamespace(state_dict=lambda: followed)
    monkeypatch.setattr(hybrid, "described", lambda *given: {"described": given})
    monkeypatch.setattr(hybrid, "trainable", lambda engine: "named")
    monkeypatch.setattr(hybrid, "check_brought", lambda *given: did.append(("checks", *given)))
    monkeypatch.setattr(hybrid, "count_steps_as_torch", lambda optimizer: did.append(("counts", optimizer)))
    monkeypatch.setattr(hybrid, "checksum_of_moments", lambda *given: given)
    monkeypatch.setattr(hybrid, "warn_of_missing_moments", lambda *given: did.append(("warns", given[0], given[2]())))
    monkeypatch.setattr(HybridEngine, "_note_rates", lambda engine: did.append("notes"))
    monkeypatch.setattr(HybridEngine, "_begin_share", lambda engine: did.append("begins"))
    monkeypatch.setattr(AsyncEngine, "_join", lambda engine, state: did.append(("joins", state)))
    if changed == "schedule":
        followed["begins_at"] = 3
    elif changed == "option":
        served.param_groups[0]["momentum"] = 0.9
    before = engine.spec
    engine._join(state)
    as_described = scheduler and changed is None
    new = framework if as_described else {"described": (engine, served, 40)}
    assert engine.spec == replace(before, framework=new)
    brings = [("checks", engine.spec, [served]), ("counts", served)] if state is None else []
    assert did == ["notes", *brings, ("joins", state), "begins", ("warns", served, False)]
    assert details.moments == (("named", [served]) if state is None else "")
    assert served.state is engine._moments and isinstance(served.state, StateInServer)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_of_an_island_brings_the_moments(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(hybrid, "brought_state", lambda *given: given)
    monkeypatch.setattr(hybrid, "trainable", lambda engine: "named")
    engine = bare(HybridEngine, context=SimpleNamespace(rank=rank), spec="spec", optimizer="torch's")
    assert engine._state_brought() == (None if rank else ("spec", "named", ["torch's"], server.build))


@pytest.mark.parametrize("divided", [False, True])
def test_an_engine_answers_for_an_optimizer_that_is_in_the_server(
    monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    did, weight = list[Any](), Parameter(torch.ones(1))
    own, served = SGD([weight], lr=0.5), SGD([Parameter(torch.ones(1))], lr=0.25)
    for name in ("refuse_moments", "answer_for_masters", "PartitionedReplica"):
        monkeypatch.setattr(hybrid, name, noting(did, name, name))
    monkeypatch.setattr(hybrid, "trainable", lambda engine: [("weight", weight)])
    monkeypatch.setattr(hybrid, "wrapped", lambda *given: given)
    monkeypatch.setattr(HybridEngine, "zero_optimization_partition_weights", lambda engine: divided, raising=False)
    monkeypatch.setattr(HybridEngine, "_check_rates", lambda engine: did.append("checks"))
    monkeypatch.setattr(AsyncEngine, "set_up", lambda engine, *given: did.append(given))
    engine = bare(
        HybridEngine,
        optimizer=own,
        loss_scaler=LossScale({"enabled": True, "loss_scale": 8}),
        lr_scheduler=None,
        config={},
    )
    engine._followed = SimpleNamespace(state_dict=lambda: {"begins_at": 5})
    described = describe(own, [("weight", weight)], "", [[0.25], [0.125]])
    engine.spec = MethodSpec("hybrid_async", 3, framework=described.to_json())
    engine.serve(served if divided else own, 2)
    engine.set_up("worker", engine.spec, "context", "run")
    assert ("worker", engine.spec, "context", "run") in did and did[-1] == "checks"
    assert engine._began == {"begins_at": 5} and engine._has_schedule is False
    assert engine._rates == present_rates(served if divided else own)
    assert engine._options == present_options(served if divided else own)
    if divided:
        assert engine.divided == "PartitionedReplica" and ("refuse_moments", own) in did
        assert did[0] == ("PartitionedReplica", [("weight", weight)], 2) and own.param_groups[0]["lr"] == 0.25
    else:
        assert engine.optimizer == (own, {}) and engine.divided is None
        assert (own.cur_scale, own.overflow) == (8.0, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("divided", [None, "parts"])
def test_masters_are_looked_at_where_deepspeed_has_them(monkeypatch: pytest.MonkeyPatch, divided: object) -> None:
    checked = list[object]()
    monkeypatch.setattr(hybrid, "check_masters", checked.append)
    bare(HybridEngine, divided=divided)._check_masters()
    assert checked == ["parts"] * (divided is not None)


def test_a_checkpoint_that_is_not_there_leaves_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncEngine, "load_checkpoint", lambda engine, *given, **named: (None, None))
    engine = bare(HybridEngine, loss_scaler=LossScale({"enabled": True, "loss_scale": 8}), optimizer=SimpleNamespace())
    assert engine.load_checkpoint("directory", load_module_only=True) == (None, None)
    assert vars(engine.optimizer) == {"cur_scale": 8.0, "loss_scale": 8.0, "overflow": False}


def test_the_rates_after_a_step_are_the_servers_also_where_a_schedule_of_torchs_shows_them() -> None:
    """A third of a step, three times, is a whole one."""
    served = SGD([Parameter(torch.zeros(1))], lr=1.0)
    schedule = LambdaLR(served, lambda step: 1.0)
    engine = bare(
        HybridEngine,
        optimizer=served,
        lr_scheduler=schedule,
        _schedule=RateTable(served, [[1.0], [0.5], [0.25], [0.125]]),
    )
    engine.async_worker = SimpleNamespace(progress=0.7 + 0.1 + 0.2 + 1)
    engine._followed = FollowedSchedule(schedule, served)
    schedule.last_epoch = 3
    engine._set_learning_rates()
    assert engine._rates == present_rates(served) == schedule.get_last_lr() == [0.25]
    engine._followed.check()
