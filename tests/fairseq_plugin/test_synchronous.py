"""How ``--optimizer adasum`` and ``adascale`` are started, end, and refuse what cannot work."""

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.trainer import Trainer
from fairseq_cli import train

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.refused import started_ranks
from fairseq_async.fairseq_plugin.session import Main
from fairseq_async.fairseq_plugin.synchronous import trainer as of_ranks
from fairseq_async.fairseq_plugin.synchronous.adascale import AdaScaleTrainer
from fairseq_async.fairseq_plugin.synchronous.adasum import AdasumTrainer
from fairseq_async.fairseq_plugin.synchronous.trainer import SynchronousTrainer
from tests.helpers.commands import MODEL, PACKAGE, Processes, command
from tests.helpers.fairseq_flags import parsed
from tests.helpers.fairseq_jobs import ADAM, ADASCALE, ADASUM, SGD
from tests.helpers.forking import command_line
from tests.helpers.run_files import load


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*ADASUM, "--adasum-form", "sum"], "--optimizer adasum: --adasum-form: Input should be 'gradient'"),
        (
            [*ADASUM, *SGD, "--adasum-sync-state", 5],
            "--adasum-sync-state is of the delta form, and --inner-optimizer sgd has",
        ),
        ([*ADASUM, "--fp16", "--cpu"], "--fp16: fairseq needs a GPU for it"),
        (
            [*ADASUM, "--memory-efficient-bf16", "--cpu"],
            "--memory-efficient-bf16: not possible with",
        ),
        (
            [*ADASUM, "--ddp-backend", "pytorch_ddp"],
            "pytorch_ddp: leave it out; adasum reduces itself",
        ),
        ([*ADASUM], "--optimizer adasum combines the gradients of several ranks, and this run has one"),
        ([*ADASCALE, *SGD], "adascale compares the gradients of a step's batches, and this step has one"),
        ([*ADASCALE, *SGD, "--adascale-scale", 0.5], "--adascale-scale: Input should be greater than or equal to 1"),
        ([*ADASCALE, *SGD, "--adascale-scale", "nan"], "--adascale-scale: Input should be"),
        (
            [*ADASCALE, "--update-freq", "2", "--ddp-backend", "fully_sharded"],
            "--ddp-backend fully_sharded: not possible",
        ),
        ([*ADASCALE, "--update-freq", "2", "--zero-sharding", "os"], "--zero-sharding os: not possible with"),
        ([*ADASCALE, "--update-freq", "2,4", "--adascale-scale", 8], "--adascale-scale with several --update-freq"),
        ([*ADASCALE, "--update-freq", "2", "--adascale-estimator", "differences"], "and this step has 2"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, flags: list[object], message: str
) -> None:
    cfg = parsed(monkeypatch, *flags)
    trainer = AdasumTrainer if "adasum" in flags else AdaScaleTrainer
    with pytest.raises(ConfigurationError) as caught:
        trainer.check(cfg)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_flags_that_fairseq_would_act_upon_first_are_refused_while_it_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--inner-optimizer", "adafactor"], "--inner-optimizer adafactor: adascale has adam, nag, sgd"),
        (["--cpu", "--distributed-world-size", 2], "is 2, and the number of processes that were started is 1: leave"),
    ):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, *ADASCALE, *flags)
        assert message in capsys.readouterr().err


STARTED = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "1", "LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("devices", "ranks_here", "expected"),
    [
        (0, "4", {"distributed_backend": "gloo"}),
        (4, "4", {"device_id": 3}),
        (2, "4", {"device_id": 1, "distributed_backend": "gloo"}),
    ],
    ids=["on CPUs", "a GPU each", "ranks share a GPU"],
)
def test_fairseq_takes_the_ranks_that_a_launcher_has_started(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks_here: str, expected: dict[str, object]
) -> None:
    for name, value in (STARTED | {"LOCAL_WORLD_SIZE": ranks_here}).items():
        monkeypatch.setenv(name, value)
    group = {"distributed_init_method": "env://", "distributed_no_spawn": True}
    assert started_ranks(devices) == group | {"distributed_rank": 5, "distributed_world_size": 8} | expected


@pytest.mark.parametrize(("devices", "expected"), [(0, {"distributed_backend": "gloo"}), (4, {"device_id": 0})])
def test_without_a_launcher_fairseq_starts_ranks_itself(devices: int, expected: dict[str, object]) -> None:
    assert started_ranks(devices) == expected


def test_fairseqs_spawn_can_send_our_main_to_the_processes_that_it_starts() -> None:
    ours = Main(train, train.main)
    assert pickle.loads(pickle.dumps(ours)).module is train


@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_the_ranks_are_started_by(processes: Processes, data: Path, tmp_path: Path, launcher: str) -> None:
    flags = [data, *MODEL, "--save-dir", tmp_path, "--max-update", 8]
    if launcher == "torchrun":
        start = [command("torchrun"), "--standalone", "--nproc-per-node", 2, command("fairseq-train")]
        code, output = processes.run([*start, *flags, "--user-dir", PACKAGE, *ADASCALE, *SGD])
    else:
        start = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train"]
        code, output = processes.run([*start, *flags, *ADASUM, *ADAM])
        assert (tmp_path / "logs" / "worker-1.log").exists()
    assert code == 0, output[-3000:]
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] >= 8


def test_a_rank_that_dies_ends_the_run(processes: Processes, data: Path, tmp_path: Path) -> None:
    start = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", data, *MODEL, *ADASUM, *ADAM]
    launcher = processes.start([*start, "--save-dir", tmp_path, "--max-update", 1000000, "--disable-validation"])
    log = tmp_path / "logs" / "worker-0.log"
    deadline = time.monotonic() + 200
    while not (log.exists() and '"num_updates": "10"' in log.read_text()):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.1)
    victim = next(pid for pid in children(launcher.pid) if command_line(pid)[1].get("LOCAL_RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 1 and "worker 1 was killed by SIGKILL" in output
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in _line(pid)]


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _line(process: Path) -> str:
    try:
        return " ".join(command_line(int(process.name))[0])
    except OSError:
        return ""


def bare_trainer(**attributes: Any) -> Any:
    trainer = SynchronousTrainer.__new__(SynchronousTrainer)
    vars(trainer).update(attributes)
    return trainer


@pytest.mark.parametrize("makes", [False, True])
def test_a_resumed_run_makes_the_batches_of_its_first_epoch_again_and_only_once(
    monkeypatch: pytest.MonkeyPatch, makes: bool
) -> None:
    """Filtered samples may depend on a seed of the first epoch's. A run that begins there has them."""
    monkeypatch.setattr(Trainer, "get_train_iterator", lambda trainer, epoch, *given, **more: (epoch, more))
    monkeypatch.setattr(of_ranks, "batches_of_first_epoch", lambda task, cfg, make: make() if makes else None)
    new, resumed = (bare_trainer(task=None, cfg=None, _has_iterator=False) for _ in range(2))
    assert [new.get_train_iterator(epoch) for epoch in (1, 2)] == [(1, {}), (2, {})]
    first = (1, {"load_dataset": False}) if makes else (3, {})
    assert [resumed.get_train_iterator(epoch) for epoch in (3, 4)] == [first, (4, {})]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("is_dummy", [False, True])
def test_the_weight_of_a_batch_counts_where_it_is_trained_and_no_dummy(trains: bool, is_dummy: bool) -> None:
    trainer = bare_trainer(_weights=[], _is_dummy=is_dummy)
    with torch.set_grad_enabled(trains):
        trainer._after_forward(None, None, (torch.ones(1), torch.tensor(7.0), {}))
    assert trainer._weights == [7.0] * (trains and not is_dummy)


def test_a_step_takes_the_batches_that_are_no_dummies_or_one_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = list[Any]()
    monkeypatch.setattr(Trainer, "train_step", lambda trainer, samples, raise_oom: taken.append(list(samples)))
    trainer = bare_trainer(_weights=[3.0])
    for samples in ([{"id": 1}, {}, {"id": 2}], [{}, {}]):
        trainer.train_step(samples)
    assert taken == [[{"id": 1}, {"id": 2}], [{}]] and trainer._weights == [] and trainer._in_step is False
