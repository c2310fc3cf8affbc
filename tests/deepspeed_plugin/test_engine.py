"""What the engines count and exchange, of DeepSpeed's engine only what that needs."""

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from fairseq_async.deepspeed_plugin.engines import local_sgd
from fairseq_async.deepspeed_plugin.engines.adasum import AdasumEngine
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.hybrid import HybridEngine
from fairseq_async.deepspeed_plugin.engines.local_sgd import LocalEngine
from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine
from fairseq_async.deepspeed_plugin.engines.tensors import check_masters, has_no_gradient, replica_of, trainable
from fairseq_async.deepspeed_plugin.engines.zero3 import ShownGroups
from fairseq_async.deepspeed_plugin.schedules import FollowedSchedule
from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange import SharedMemory
from fairseq_async.protocol import Push
from fairseq_async.worker.changes import LoopWatch
from fairseq_async.worker.connection.island import IslandClient, _share_slot
from fairseq_async.worker.start.context import WorkerContext


def with_optimizer(model: nn.Module, **optimizer: Any) -> Any:
    """An engine without ZeRO 3."""
    whole = SimpleNamespace(module=model, zero_optimization_partition_weights=lambda: False)
    return SimpleNamespace(**vars(whole), optimizer=SimpleNamespace(**optimizer))


def test_what_zero_does_not_step_is_not_exchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for each in model[1].parameters():  # DeepSpeed has a master of what the optimizer steps
        address = SimpleNamespace(start=0)
        each._hp_mapping = SimpleNamespace(lp_fragment_address=address, hp_fragment=each.detach().clone().view(-1))
    engine = with_optimizer(model, bit16_groups=[list(model[1].parameters())])
    assert [segment.name for segment in replica_of(engine, 0).layout.segments] == ["1.weight", "1.bias"]


def test_parameters_that_are_loaded_beside_their_masters_are_one_line() -> None:
    model = nn.Linear(2, 3).to(torch.bfloat16)
    masters = [each.detach().float().view(-1) * (1 + 2**-12) for each in model.parameters()]
    groups = {"fp16_groups": [list(model.parameters())], "fp32_groups_flat": [torch.cat(masters)]}
    engine = with_optimizer(model, **groups)
    check_masters(replica_of(engine, 0))  # which bfloat16 rounds to the parameters
    model.load_state_dict(nn.Linear(2, 3).state_dict())
    with pytest.raises(ConfigurationError, match="weight was changed after initialize, and its fp32 master was not"):
        check_masters(replica_of(engine, 0))


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_of_the_ranks_of_an_island_that_all_hold_everything_the_first_one_alone_writes_it(kind: str) -> None:
    """Another one may come to it when the server has answered in the same memory."""
    model = nn.Linear(2, 3).to(torch.float16 if kind == "fp16" else torch.float32)
    masters = [each.detach().float().view(-1) for each in model.parameters()]
    groups = {"fp16_groups": [list(model.parameters())], "fp32_groups_flat": [torch.cat(masters)]}
    engine = with_optimizer(model, **groups if kind == "fp16" else vars(SGD(model.parameters())))
    for rank, expected in ((0, torch.cat(masters)), (1, torch.zeros(9))):
        replica_of(engine, rank).read(shared := torch.zeros(9), shared=True)
        assert torch.equal(shared, expected)


@pytest.mark.parametrize(("dtype", "key"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_model_in_half_precision_without_masters_is_one_line_with_the_key_that_makes_them(
    dtype: torch.dtype, key: str
) -> None:
    model = nn.Linear(2, 1).to(dtype)
    engine = with_optimizer(model, **vars(SGD(model.parameters())))
    with pytest.raises(ConfigurationError, match=f'weight is .*float16, .* give "{key}": {{"enabled": true}}'):
        replica_of(engine, 0)


def test_an_optimizer_of_another_model_is_one_line() -> None:
    model = nn.Linear(2, 1)
    engine = with_optimizer(model, **vars(SGD([Parameter(torch.zeros(1))])))
    with pytest.raises(ConfigurationError, match="1 parameters that are not the model's"):
        replica_of(engine, 0)
    engine = with_optimizer(model.requires_grad_(False), **vars(SGD(model.parameters())))
    with pytest.raises(ConfigurationError, match="no parameter of the model that is trained"):
        replica_of(engine, 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model[1].bias.requires_grad_(False), "1.bias"),
        (lambda model: model[0].weight.requires_grad_(True), "0.weight"),
        (lambda model: setattr(model[1], "weight", Parameter(torch.zeros(1, 3))), "1.weight"),
    ],
    ids=["frozen", "unfrozen", "made anew"],
)
def test_parameters_that_are_trained_are_those_that_were_when_the_run_began(
    change: Callable[[Any], object], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)
    engine: Any = SimpleNamespace(module=model)
    engine._trained = trainable(engine)
    AsyncEngine._check_trained(engine)
    change(model)
    with pytest.raises(SystemExit):
        AsyncEngine._check_trained(engine)
    assert f"error: {name} was frozen, unfrozen or made anew during the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("deals", "drawn", "rest", "sends"),
    [
        (False, 6, 2, True),  # the second step of four is complete with them
        (False, 11, 1, True),
        (False, 5, 2, False),
        (False, 8, 3, False),
        (False, 10, 1, False),
        (False, 10, 2, True),
        (False, 11, 0, False),
        (False, 4, 0, False),
        (False, None, 3, False),  # the first step
        (False, None, 4, True),
        (True, 15, 1, True),  # of both workers together, a step has eight
        (True, 11, 1, False),
    ],
)
@pytest.mark.parametrize(("for_all", "finished"), [(False, False), (True, False), (False, True)])
def test_what_a_loop_has_left_is_sent_at_its_end_where_it_completes_a_step_of_the_average(
    monkeypatch: pytest.MonkeyPatch,
    deals: bool,
    drawn: int | None,
    rest: int,
    sends: bool,
    for_all: bool,
    finished: bool,
) -> None:
    """Plain DeepSpeed steps after the 4th, the 8th and the 12th micro-batch."""
    engine: Any = HybridEngine.__new__(HybridEngine)
    nn.Module.__init__(engine)
    engine.spec, engine.workers, engine.deals = SimpleNamespace(micro_batches=4), 2, deals
    engine._share, engine._first, engine.micro_steps = 3, 10, 10 + rest
    given = {"first_micro_batch": drawn, "drawn": None} if deals else {"first_micro_batch": None, "drawn": drawn}
    engine.async_worker = SimpleNamespace(finished=finished, **given)
    done = list[object]()
    monkeypatch.setattr(HybridEngine, "_step_with", lambda engine, rest: done.append(rest))
    monkeypatch.setattr(AsyncEngine, "end", lambda engine, for_all: done.append(f"ends {for_all}"))
    engine.end(for_all)
    assert done == [rest] * (sends and not for_all and not finished) + [f"ends {for_all}"]
    engine._share = engine.spec.micro_batches = 0  # of a run whose steps the server does not divide
    engine.end(for_all)
    assert done[-1] == done[-2] == f"ends {for_all}"


def test_the_micro_batches_of_all_steps_are_counted_and_a_step_begins_with_the_share_of_the_next() -> None:
    engine: Any = SimpleNamespace(spec=SimpleNamespace(micro_batches=4), trained=0)
    found = []
    for passes, share, first in ((3, 5, 3), (5, 2, 8), (2, 4, 10)):
        engine._passes, engine.async_worker, engine.micro_steps = passes, SimpleNamespace(micro_batches=share), first
        HybridEngine._begin_share(engine)
        found.append((engine.trained, engine._share, engine._first, engine._passes))
    assert found == [(3, 5, 3, 0), (8, 2, 8, 0), (10, 4, 10, 0)]
    engine.spec.micro_batches, engine._passes = 0, 7
    HybridEngine._begin_share(engine)
    assert engine.trained == 10 and engine._passes == 7, "only where the server divides them"


@pytest.mark.parametrize(("shard", "follows"), [(None, 9.0), (1, 4.0)])
def test_rates_go_by_the_progress_by_which_a_trainer_counts_but_for_those_of_a_shard(
    shard: int | None, follows: float
) -> None:
    """That of the run never goes back: a Trainer would log a step with the rate of one that it had logged before."""
    followed = list[float]()
    engine: Any = LocalEngine.__new__(LocalEngine)
    nn.Module.__init__(engine)
    engine._own, engine._followed = MagicMock(), SimpleNamespace(follow=followed.append)
    engine.async_worker = SimpleNamespace(shard=shard, progress=4.0, run_progress=9.0)
    LocalEngine._set_learning_rates(engine)
    assert followed == [follows]


@pytest.mark.parametrize("look_ahead", [0.0, 2.0])
def test_an_evaluation_and_a_checkpoint_of_a_worker_that_is_ahead_are_of_the_servers_own_parameters(
    monkeypatch: pytest.MonkeyPatch, look_ahead: float
) -> None:
    done: list[str] = []
    engine = HybridEngine.__new__(HybridEngine)
    nn.Module.__init__(engine)
    engine._loop_watch, engine.loss_scaler = LoopWatch(lambda: [], []), LossScale()
    engine.async_worker = cast(
        Any, SimpleNamespace(look_ahead=look_ahead, joined=True, finished=False, catch_up=lambda: done.append("pulls"))
    )

    def save(engine: HybridEngine, *arguments: object) -> str:
        assert engine._saves, "the optimizer is saved without its moments, and the server's state beside it"
        done.append(f"saves {arguments}")
        return "saved"

    monkeypatch.setattr(AsyncEngine, "save_checkpoint", save)
    assert engine.save_checkpoint("directory", "tag", {"epoch": 3}) == "saved" and not engine._saves
    monkeypatch.setattr(DeepSpeedEngine, "eval", lambda engine: done.append("evaluates"))
    engine.eval()
    pulls = ["pulls"] * bool(look_ahead)
    state = {"epoch": 3, "async_loss_scale": {"cur_scale": 1.0}}
    assert done == [*pulls, f"saves ('directory', 'tag', {state})", *pulls, "evaluates"]


def test_a_run_in_fp16_goes_on_with_the_loss_scale_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with how long the scale has stayed as it is."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine, before = HybridEngine.__new__(HybridEngine), LossScale(section)
    nn.Module.__init__(engine)
    assert [before.skips(finite) for finite in (False, True)] == [True, False]
    engine.loss_scaler, engine.optimizer = LossScale(section), cast(Any, SGD([Parameter(torch.zeros(1))]))
    saved = before.state_dict()
    loaded = "path", {"async_loss_scale": dict(saved), "epoch": 3}
    monkeypatch.setattr(AsyncEngine, "load_checkpoint", lambda engine, *arguments: loaded)
    assert saved != engine.loss_scaler.state_dict() and before.value != engine.loss_scaler.value
    assert engine.load_checkpoint("directory") == ("path", {"epoch": 3}), "what the script has saved is left"
    assert engine.loss_scaler.state_dict() == saved and engine.optimizer.cur_scale == before.value


def test_a_step_of_the_micro_batches_that_are_left_has_their_mean_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss was divided by six, and two have come."""
    engine, did = cast(Any, HybridEngine.__new__(HybridEngine)), list[object]()
    nn.Module.__init__(engine)
    weight = Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, -2.0])
    engine._share, engine._first, engine._passes, engine.trained, engine.micro_steps = 6, 10, 2, 30, 12
    engine.async_worker, engine.spec = SimpleNamespace(micro_batches=6), SimpleNamespace(micro_batches=4)
    monkeypatch.setattr("fairseq_async.deepspeed_plugin.engines.hybrid.trainable", lambda _: [("weight", weight)])
    monkeypatch.setattr(HybridEngine, "allreduce_gradients", lambda engine: did.append(weight.grad.tolist()))

    def step(engine: Any, lr_kwargs: object) -> None:
        did.append((engine._share, engine.async_worker.micro_batches))
        engine.async_worker.micro_batches = 5  # the next share

    monkeypatch.setattr(HybridEngine, "_take_model_step", step)
    engine._step_with(2)
    assert did == [[3.0, -6.0], (2, 2)], "ranks add up what is scaled"
    assert (engine._share, engine._first, engine._passes, engine.trained) == (5, 12, 0, 32)


class Saving:
    """Of a worker: what its engine asks of it to save and to load."""

    def __init__(self, joined: bool) -> None:
        self.joined, self.finished, self.did, self.connected = joined, False, list[str](), True
        self.client = SimpleNamespace(save_state=self.save_state, leave=self.leave)

    def save_state(self, path: str) -> None:
        if not self.connected:
            raise ExchangeError("the peer closed the connection")
        Path(path).write_text("the server's state")

    def leave(self, finished: bool) -> None:
        self.connected = False

    def settle(self) -> None:
        self.did.append("settles")

    def catch_up(self) -> None:
        self.did.append("pulls")

    def await_end(self) -> None:
        self.did.append("waits for the end")

    def compressor_state(self) -> dict[str, str]:
        return {"unsent": "compressor"}

    def restore_compressor(self, state: dict[str, str]) -> None:
        self.did.append(f"restores the {state['unsent']}")


class SavingEngine(LocalEngine):
    """Of DeepSpeed's part of it, the directories that it is given."""

    def __init__(self, run_dir: Path, worker: int = 0, joined: bool = True) -> None:
        nn.Module.__init__(self)
        self.optimizer = self.lr_scheduler = None
        self.async_worker, self.context = cast(Any, Saving(joined)), cast(Any, SimpleNamespace(rank=0))
        self.worker, self._state_at_end, self._has_left = worker, run_dir / "state", False
        self._loop_watch = LoopWatch(lambda: [], [])
        self.given, self._followed = list[str](), FollowedSchedule(None, SGD([Parameter(torch.zeros(1))]))

    @property
    def did(self) -> list[str]:
        return cast(Saving, self.async_worker).did

    def load_universal_checkpoint(self) -> bool:
        return False

    def zero_optimization_stage(self) -> int:
        return 0

    def _join(self, server_state: Path | None) -> None:
        self.did.append("joins" if server_state is None else "joins with the server's state")


@pytest.fixture
def of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed saves and loads directories alone."""

    def save(engine: SavingEngine, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        engine.did.append("saves")
        (Path(directory) / tag).mkdir(parents=True)
        torch.save(client_state, Path(directory) / tag / "client_state.pt")
        (Path(directory) / "latest").write_text(tag)

    def load(engine: SavingEngine, directory: str, tag: str | None, *arguments: object) -> tuple[str, dict[str, Any]]:
        engine.given.append(directory)
        loaded = Path(directory) / (tag or (Path(directory) / "latest").read_text())
        return str(loaded / "model.pt"), torch.load(loaded / "client_state.pt", weights_only=True)

    def save_model(engine: SavingEngine, directory: str, name: str) -> None:
        engine.given.append(f"{directory}/{name}")

    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", save)
    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", load)
    monkeypatch.setattr(DeepSpeedEngine, "save_16bit_model", save_model)


@pytest.mark.usefixtures("of_deepspeed")
def test_a_checkpoint_after_the_end_has_the_servers_state_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit = list[Callable[[], object]]()
    register = SimpleNamespace(register=lambda call, **given: at_exit.append(partial(call, **given)))
    monkeypatch.setattr("fairseq_async.deepspeed_plugin.engines.engine.atexit", register)
    engine = SavingEngine(tmp_path / "run")
    engine.end()
    for tag in ("a", "b"):
        engine.save_checkpoint(str(tmp_path), tag)
        assert (tmp_path / tag / "async_server.pt").read_text() == "the server's state"
    assert engine.did == ["waits for the end", *["settles", "saves"] * 2] and engine._state_at_end.exists()
    for call in at_exit:
        call()
    assert not engine._state_at_end.exists(), "once this process ends"


@pytest.mark.parametrize("for_all", [False, True])
def test_a_worker_without_a_step_has_no_part_to_end(tmp_path: Path, for_all: bool) -> None:
    """A loop without a batch calls end(), too: the server knows nothing of a worker that has not joined."""
    engine = SavingEngine(tmp_path / "run", joined=False)
    engine.end(for_all)
    assert engine.did == [] and cast(Saving, engine.async_worker).connected


NEW, RESUMED = ["joins"], ["joins with the server's state", "restores the compressor"]


@pytest.mark.usefixtures("of_deepspeed")
def test_a_schedule_that_is_to_begin_anew_does(tmp_path: Path) -> None:
    saving = SavingEngine(tmp_path)
    saving._followed.rates = [0.5]
    saving.save_checkpoint(str(tmp_path), "a")
    engine = SavingEngine(tmp_path, joined=False)
    engine.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)
    assert (engine.did, engine._followed.rates) == (RESUMED, [0.001])


def test_the_engines_own_optimizer_shows_the_rates_of_the_servers() -> None:
    served, own = (SGD([Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    engine: Any = SimpleNamespace(
        _schedule=SimpleNamespace(follow=lambda step: served.param_groups[0].update(lr=1.0 / step)),
        async_worker=SimpleNamespace(progress=4.0),
        lr_scheduler=None,
        served=served,
        _shown=ShownGroups(own.param_groups, served.param_groups),
        _followed=MagicMock(),
    )
    HybridEngine._set_learning_rates(engine)
    assert own.param_groups[0]["lr"] == 0.25


def test_a_rate_that_a_script_sets_between_two_steps_ends_the_worker_before_it_sends_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = MagicMock()
    engine._is_past_the_end.return_value = False
    engine._check_rates.side_effect = ConfigurationError("something else sets the learning rate")
    with pytest.raises(SystemExit):
        HybridEngine._take_model_step(engine, None)
    assert "something else sets the learning rate" in capsys.readouterr().err
    assert not engine.async_worker.mock_calls


def test_a_step_has_no_gradient_where_none_of_its_parameters_has_one() -> None:
    model = nn.Linear(2, 3)
    assert has_no_gradient(with_optimizer(model))
    assert not has_no_gradient(with_optimizer(model, bit16_groups=[list(model.parameters())])), "DeepSpeed takes it"
    model.bias.grad = torch.zeros(3)
    assert not has_no_gradient(with_optimizer(model))


@pytest.mark.usefixtures("of_deepspeed")
@pytest.mark.parametrize(
    ("worker", "only", "missing", "did"),
    [
        *[(worker, True, None, NEW) for worker in (0, 1)],
        *[(worker, False, None, RESUMED) for worker in (0, 1)],
        *[(worker, False, "a/async_server.pt", NEW) for worker in (0, 1)],
        (1, False, "a", RESUMED),  # worker 0's checkpoint is on another disk
    ],
)
def test_every_worker_goes_on_where_the_run_began_if_worker_0_has_the_servers_state(
    tmp_path: Path, worker: int, only: bool, missing: str | None, did: list[str]
) -> None:
    SavingEngine(tmp_path).save_checkpoint(str(tmp_path), "a")
    saving = SavingEngine(tmp_path, worker)
    saving._followed.rates = [0.5]
    shutil.rmtree(tmp_path / "worker-1" / "a" if worker else tmp_path / "a", ignore_errors=True)
    saving.save_checkpoint(str(tmp_path), "a")
    if missing is not None:
        (tmp_path / missing).rename(tmp_path / "elsewhere")
    engine = SavingEngine(tmp_path, worker, joined=False)
    engine.load_checkpoint(str(tmp_path), load_module_only=only)
    assert (engine.did, engine._followed.rates) == (did, [0.001] if did is NEW else [0.5])


@pytest.mark.usefixtures("of_deepspeed")
def test_the_optimizer_of_the_server_cannot_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SavingEngine(tmp_path).save_checkpoint(str(tmp_path), "a")
    local = SavingEngine(tmp_path, joined=False)
    local.optimizer = SimpleNamespace(refresh_fp32_params=lambda: local.did.append("refreshes masters"))
    monkeypatch.setattr(SavingEngine, "zero_optimization", lambda engine: False)
    local.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert local.did[:2] == ["refreshes masters", "joins with the server's state"]
    monkeypatch.setattr(SavingEngine, "_check_without_optimizer", HybridEngine._check_without_optimizer)
    with pytest.raises(SystemExit):
        SavingEngine(tmp_path, joined=False).load_checkpoint(str(tmp_path), load_optimizer_states=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert "load_optimizer_states=False" in line and "load_module_only=True" in line


@pytest.mark.usefixtures("of_deepspeed")
def test_a_worker_without_a_checkpoint_of_that_tag_takes_worker_0s(tmp_path: Path) -> None:
    own = str(tmp_path / "worker-1")
    for tag in ("a", "b"):
        SavingEngine(tmp_path).save_checkpoint(str(tmp_path), tag)
    SavingEngine(tmp_path, worker=1).save_checkpoint(str(tmp_path), "a")
    for tag, expected in (("a", own), ("b", str(tmp_path)), (None, own)):
        engine = SavingEngine(tmp_path, worker=1, joined=False)
        engine.load_checkpoint(str(tmp_path), tag)
        assert engine.given == [expected]


def test_a_rank_of_adasum_without_a_checkpoint_of_that_tag_takes_rank_0s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = cast(Any, AdasumEngine.__new__(AdasumEngine)), list[object]()
    nn.Module.__init__(engine)
    engine.worker = 1
    for name in ("a", "b", "worker-1/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "latest").write_text("b")
    monkeypatch.setattr(SynchronousEngine, "load_checkpoint", lambda engine, *args: given.append(args))
    for tag in ("a", "b", None):
        engine.load_checkpoint(str(tmp_path), tag)
    assert given == [(str(tmp_path / "worker-1"), "a"), (str(tmp_path), "b"), (str(tmp_path), "b")]


@pytest.mark.usefixtures("of_deepspeed")
@pytest.mark.parametrize(("tag", "said"), [("c", "c; its"), (None, "b, which its file latest names; its")])
def test_a_checkpoint_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tag: str | None, said: str
) -> None:
    for each in ("a", "b"):
        SavingEngine(tmp_path).save_checkpoint(str(tmp_path), each)
    shutil.rmtree(tmp_path / "b")  # as a script does that keeps few checkpoints
    with pytest.raises(SystemExit):
        SavingEngine(tmp_path, joined=False).load_checkpoint(str(tmp_path), tag)
    line = f"load_checkpoint: {tmp_path} has no checkpoint {said} directories are: a; give one as tag="
    assert capsys.readouterr().err == f"fairseq-async: error: {line}\n"


@pytest.mark.usefixtures("of_deepspeed")
@pytest.mark.parametrize(("worker", "pulls", "file"), [(0, ["pulls"], "m.bin"), (1, ["settles"], "worker-1/m.bin")])
def test_a_model_is_saved_with_the_servers_parameters_and_by_each_worker_in_its_own_place(
    tmp_path: Path, worker: int, pulls: list[str], file: str
) -> None:
    engine = SavingEngine(tmp_path, worker)
    engine.save_fp16_model(str(tmp_path), "m.bin")
    assert (engine.did, engine.given) == (pulls, [f"{tmp_path}/{file}"])


def test_a_worker_that_joins_late_begins_with_the_learning_rate_of_the_runs_progress(tmp_path: Path) -> None:
    engine, drawn = cast(Any, SavingEngine(tmp_path)), SGD([Parameter(torch.zeros(1))], lr=1.0)
    engine._followed = FollowedSchedule(LambdaLR(drawn, lambda step: 0.5**step), drawn)
    engine.spec, engine.loop = None, SimpleNamespace(join=lambda *given: None)
    vars(engine.async_worker).update(run_progress=3.0, shard=None)
    AsyncEngine._join(engine, None)
    assert drawn.param_groups[0]["lr"] == 0.125


def test_the_ranks_of_an_island_have_their_workers_slot_also_after_the_server_has_come_back() -> None:
    other: Any = IslandClient(None, WorkerContext(2, 3, rank=1))
    other._size = 4
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for value in (1.0, 2.0):
        memory = SharedMemory.create(4, 3, publishes=False)
        memory.allocate_slot(2)
        memory.slot(2).fill_(value)
        other._attach_slot(
            _share_slot(cast(Any, SimpleNamespace(memory=SimpleNamespace(shared=memory, remote=False), worker=2)), 4)
        )
        assert other.slot.tolist() == [value] * 4
        memory.close()
    del memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files + 1, "the present slot's"


def test_no_rank_of_an_island_writes_the_slot_before_all_have_read_it_nor_sends_it_half_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    client: Any = SimpleNamespace(slot=torch.zeros(2), compressor=None, connection=SimpleNamespace(lock=nullcontext()))
    for name in ("initialise", "push", "pull"):
        setattr(client, name, lambda *_, name=name, **given: did.append(name))
    island: Any = IslandClient(client, WorkerContext(0, 1))
    monkeypatch.setattr(island, "_barrier", lambda: did.append("all"))
    monkeypatch.setattr(island, "_broadcast_answer", lambda request, kind: request(client))
    island.initialise(None)
    island.push(lambda slot: did.append("write"), Push(0, 0, 1.0))
    island.pull(lambda slot: did.append("read"))
    assert did == ["all", "initialise", "write", "all", "push", "pull", "read", "all"]


def test_an_engine_is_in_a_step_while_deepspeed_steps_and_one_of_local_sgd_keeps_its_schedule_from_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of it, a step of the optimizer is the script's own, which is refused."""
    engine, seen = SavingEngine(tmp_path), list[tuple[bool, object]]()
    engine.lr_scheduler, engine._takes_step = "schedule", False
    for name in ("_check_trained", "_check_followed", "_is_past_the_end"):
        monkeypatch.setattr(LocalEngine, name, lambda self: False)
    for name in ("has_no_gradient", "has_nonfinite_step"):
        monkeypatch.setattr(local_sgd.tensors, name, lambda engine: False)

    def step(self: Any, kwargs: object) -> None:
        seen.append((self._takes_step, self.lr_scheduler))

    monkeypatch.setattr(DeepSpeedEngine, "_take_model_step", step)
    engine._take_model_step(None)
    assert seen == [(True, None)] and (engine._takes_step, engine.lr_scheduler) == (False, "schedule")
    synchronous, given = SynchronousEngine.__new__(SynchronousEngine), seen.copy()
    nn.Module.__init__(synchronous)
    synchronous.lr_scheduler, synchronous._takes_step = None, False
    synchronous._take_model_step(None)
    assert seen == 2 * given and not synchronous._takes_step
