"""What surrounds fairseq's ``main``, with a module and a method made up for it."""

import queue
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from fairseq import checkpoint_utils
from fairseq.data import iterators
from fairseq.data.iterators import BackgroundConsumer
from fairseq.trainer import Trainer

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin import session
from fairseq_async.fairseq_plugin.command_line import _without_our_directory, read_command, write_command
from fairseq_async.fairseq_plugin.compat import shutdown
from fairseq_async.fairseq_plugin.compat.dealt import grouped
from fairseq_async.fairseq_plugin.registry import METHODS, SynchronousMethod
from fairseq_async.fairseq_plugin.replayed import _check
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.commands import MODEL
from tests.helpers.fairseq_trainers import HYBRID, Trainers, step
from tests.helpers.stand_ins import Time
from tests.helpers.waiting import wait_until


class OurTrainer: ...


def accept(cfg: Any) -> None: ...


def refuse(cfg: Any) -> None:
    raise ConfigurationError("--flag: wrong")


def command_module(main: Callable[[ModuleType, Any], None]) -> ModuleType:
    """A module like ``fairseq_cli.train``, whose ``main`` is given the module and the configuration."""
    module = ModuleType("fairseq_cli.train")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    module.main = lambda cfg: main(module, cfg)  # type: ignore[attr-defined]
    module.get_valid_stats = lambda *stats: stats  # type: ignore[attr-defined]
    module.convert_namespace_to_omegaconf = lambda args: args  # type: ignore[attr-defined]
    session.attach({"fairseq_cli.train": module})
    return module


@pytest.fixture
def cfg(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Of a run with ``--optimizer made_up``, which is our only method."""
    monkeypatch.setitem(METHODS, "made_up", SynchronousMethod(OurTrainer, accept))
    monkeypatch.setattr(session, "_RANK_0_FIRST", 0.0)
    distributed = Namespace(distributed_rank=1)
    return Namespace(optimizer=Namespace(optimizer="made_up"), distributed_training=distributed)


@pytest.mark.parametrize(
    ("max_epoch", "micro_batches", "window", "left"),
    [(3, 0, None, (0, [4, 2], None)), (0, 4, None, (0, [1], 4096)), (3, 4, 100, (0, [1], 100))],
)
def test_what_the_server_does_is_taken_from_fairseqs_configuration(
    max_epoch: int, micro_batches: int, window: int | None, left: tuple[int, list[int], int | None]
) -> None:
    """fairseq's own loss scale grows after as many batches of a rank, however many are in a step."""
    cfg, spec = Namespace(optimization=Namespace(max_epoch=max_epoch, update_freq=[4, 2])), SimpleNamespace()
    cfg.common, spec.max_epoch, spec.micro_batches = Namespace(fp16_scale_window=window), max_epoch, micro_batches
    session.leave_to_server(cfg, cast(Any, spec))
    assert (cfg.optimization.max_epoch, cfg.optimization.update_freq, cfg.common.fp16_scale_window) == left


def test_main_finds_the_methods_trainer_and_afterwards_fairseqs_is_back(cfg: Namespace) -> None:
    found = []
    module = command_module(lambda module, cfg: found.append(module.Trainer))
    module.main(cfg)
    assert found == [OurTrainer] and module.Trainer is Trainer


def test_main_groups_the_batches_that_are_dealt_and_afterwards_fairseqs_iterators_are_back(cfg: Namespace) -> None:
    found = []
    module = command_module(lambda module, cfg: found.append(module.iterators))
    module.iterators = iterators  # type: ignore[attr-defined]
    module.main(cfg)
    assert found[0].GroupedIterator is grouped and found[0].CountingIterator is iterators.CountingIterator
    assert module.iterators is iterators


@pytest.mark.parametrize(("rank", "pauses"), [(0, []), (1, [5.0])])
def test_another_rank_keeps_its_error_back_for_a_while_since_rank_0_prints_the_same(
    cfg: Namespace, monkeypatch: pytest.MonkeyPatch, rank: int, pauses: list[float]
) -> None:
    time = Time()
    monkeypatch.undo()  # the fixture's, of the seconds
    monkeypatch.setitem(METHODS, "made_up", SynchronousMethod(OurTrainer, refuse))
    monkeypatch.setattr(session, "time", time)
    cfg.distributed_training.distributed_rank = rank
    module = command_module(lambda module, cfg: None)
    with pytest.raises(SystemExit):
        module.main(cfg)
    assert time.pauses == pauses


@pytest.mark.parametrize(("taken_at", "ends"), [(3, 3.0), (1 << 30, 10.0)], ids=["ends after a batch", "hangs"])
def test_what_prepares_a_batch_for_nobody_has_ten_seconds_to_end_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, taken_at: int, ends: float
) -> None:
    """Room in its queue lets it go on, and the batch that it puts there is its last one."""
    time = Time(0.0)

    def get(timeout: float) -> None:
        time.now += 0.5
        raise queue.Empty

    consumers = [BackgroundConsumer(SimpleNamespace(get=get), [], None, None) for _ in range(2)]
    for each in consumers:
        monkeypatch.setattr(each, "is_alive", lambda: time.now < taken_at)
    monkeypatch.setattr(shutdown, "time", time)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), *consumers])
    shutdown.end_prefetching()
    assert time.now == ends and [each._max_len for each in consumers] == [0, 0]


def test_a_module_is_wrapped_once(cfg: Namespace) -> None:
    module = command_module(lambda module, cfg: None)
    wrapped = module.main
    session.attach({"__main__": module, "fairseq_cli.train": module})
    assert module.main is wrapped


def test_a_trainer_of_the_users_own_is_not_passed_over(cfg: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    """A --user-dir has put it there, and none of its methods would be called."""
    module = command_module(lambda module, cfg: pytest.fail("it trains"))
    module.Trainer = type("Own", (Trainer,), {"__module__": "user_dir"})  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end:
        module.main(cfg)
    assert end.value.code == 2 and "user_dir.Own is in the place of fairseq's Trainer" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["check", "main"])
def test_an_error_is_one_line_and_exit_code_2(
    cfg: Namespace, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(module: ModuleType, cfg: Any) -> None:
        raise AsyncError("--flag: wrong")

    if where == "check":
        monkeypatch.setitem(METHODS, "made_up", SynchronousMethod(OurTrainer, refuse))
    module = command_module(main)
    with pytest.raises(SystemExit) as end:
        module.main(cfg)
    assert end.value.code == 2 and capsys.readouterr().err == "fairseq-async: error: --flag: wrong\n"
    assert module.Trainer is Trainer


def test_control_c_is_one_line_and_exit_code_130(cfg: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    def main(module: ModuleType, cfg: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        command_module(main).main(cfg)
    assert end.value.code == 130 and capsys.readouterr().err == "fairseq-async: interrupted\n"


@pytest.mark.parametrize("bf16", [True, False])
def test_bf16_does_not_stand_for_a_tpu(bf16: bool) -> None:
    convert = command_module(lambda module, cfg: None).convert_namespace_to_omegaconf
    assert convert(Namespace(bf16=bf16, tpu=True)).tpu is not bf16


@pytest.mark.parametrize(
    ("given", "resumes"),
    [({}, True), ({"finetune_from_model": "x.pt"}, True), ({"restore_file": "x.pt"}, False)]
    + [({f"reset_{what}": True}, False) for what in ("optimizer", "dataloader", "lr_scheduler")],
)
def test_an_interrupted_run_goes_on_unless_a_flag_says_where_to_begin(given: dict[str, Any], resumes: bool) -> None:
    """A model to tune is where fairseq begins only if there is nothing to go on from."""
    reset = {f"reset_{what}": False for what in ("optimizer", "dataloader", "lr_scheduler")}
    checkpoint = reset | {"restore_file": "checkpoint_last.pt", "finetune_from_model": None} | given
    assert session._resumes(Namespace(checkpoint=Namespace(**checkpoint))) == resumes


@pytest.mark.parametrize(("worker", "max_epoch"), [(0, 0), (0, 3), (2, 3)])
def test_worker_0_alone_validates_and_reports_and_others_write_logs_of_their_own(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, worker: int, max_epoch: int
) -> None:
    """The server counts the passes of --max-epoch, where there is one."""
    check = "verify_checkpoint_directory"  # which the worker replaces
    monkeypatch.setattr(checkpoint_utils, check, getattr(checkpoint_utils, check))
    reports = "--wandb-project mine --aim-repo mine --log-file out.log --tensorboard-logdir board"
    cfg = trainers.make(f"{HYBRID} --max-epoch {max_epoch} {reports}", worker=worker, workers=3).cfg
    assert cfg.optimization.max_epoch == 0 and cfg.dataset.disable_validation == (worker > 0)
    common = cfg.common
    left = (common.wandb_project, common.aim_repo, common.log_file, common.tensorboard_logdir)
    own = (None, None, "out.log.worker2", "board/worker2")
    assert left == (own if worker else ("mine", "mine", "out.log", "board"))


def test_worker_0_ends_the_run_for_all_and_its_server_outlasts_it(trainers: Trainers) -> None:
    """It alone sees fairseq's limits and --patience. Others may still be in a round of local steps, which takes as long
    as it takes; the server that another has started ends by itself."""
    first, second, third = (trainers.join(HYBRID, worker=worker, workers=3) for worker in range(3))
    third.session.end()
    step(first)
    assert not first.worker.finished
    server = first.session._server = ServerProcess(
        local_sgd_main.__name__, 1, trainers.run_dir / "other", trainers.run_dir / "log"
    )
    ends = threading.Thread(target=first.session.end, daemon=True)
    ends.start()
    try:
        wait_until(lambda: (step(second), second.worker.finished)[1], 20)
        assert ends.is_alive() and not first.session._ended
        server.over.set()  # as when all workers have left
        ends.join(20)
        assert first.session._ended
    finally:
        server.stop()


@pytest.mark.parametrize(("data", "is_missing"), [("s3://bucket/data", False), ("data", True), ("data|s3://b", True)])
def test_data_at_an_address_is_no_missing_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, is_missing: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fairseq-train", data, *map(str, MODEL)])
    write_command(tmp_path)
    with (
        pytest.raises(ConfigurationError, match="the data of the run, .*/data, is not") if is_missing else nullcontext()
    ):
        cfg, _ = read_command(tmp_path)
        assert cfg.task.data == data


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["data", "--user-dir", "/site-packages/fairseq_async", "--lr", "1"], ["data", "--lr", "1"]),
        (["data", "--lr", "1", "--user-dir", "fairseq_async"], ["data", "--lr", "1"]),
        (["--user-dir", "fairseq_async", "data", "--user-dir", "a/fairseq_async", "--lr", "1"], ["data", "--lr", "1"]),
        (["data", "--user-dir", "mine", "--lr", "1"], ["data", "--user-dir", "mine", "--lr", "1"]),
        (["data"], ["data"]),
    ],
)
def test_a_replay_needs_no_user_directory_that_is_this_package(given: list[str], kept: list[str]) -> None:
    assert _without_our_directory(given) == kept


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"gpu": True}, ""),
        ({"optimizer": "hybrid_async"}, "run: command.json and run.json are of two runs"),
        ({"optimizer": "hybrid_async", "method": "hybrid_async", "schedule": "reduce_lr_on_plateau"}, ""),
        ({"schedule": "reduce_lr_on_plateau"}, "follows validations, which a replay omits"),
        ({"fp16": True}, "only runs in fp32 on a CPU"),
        ({"bf16": True}, "only runs in fp32 on a CPU"),
        ({"gpu": True, "cpu": False}, "only runs in fp32 on a CPU"),
        ({"cpu": False}, ""),
        ({"overlap": True}, "a run with --overlap depends on when answers came"),
    ],
)
def test_a_run_that_would_not_come_out_the_same_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    its = {"optimizer": "local_sgd", "method": "local_sgd", "schedule": "fixed", "overlap": False, "gpu": False} | given
    monkeypatch.setattr("torch.cuda.is_available", lambda: its["gpu"])
    common = Namespace(**{name: its.get(name, name == "cpu") for name in ("cpu", "fp16", "bf16")})
    cfg = Namespace(common=common, optimizer=Namespace(optimizer=its["optimizer"]))
    cfg.lr_scheduler = Namespace(_name=its["schedule"])
    spec: Any = SimpleNamespace(method=its["method"], options={"overlap": its["overlap"]})
    with pytest.raises(ConfigurationError, match=said) if said else nullcontext():
        _check(Path("run"), cfg, spec)
