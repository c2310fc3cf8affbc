"""Real runs of fairseq workers, repeated in this process."""

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data.iterators import CountingIterator
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from fairseq_async import cli
from fairseq_async.algorithms import Update
from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin.registry import METHODS
from fairseq_async.fairseq_plugin.replayed import FairseqRun, ReplayedWorker
from fairseq_async.options import compression
from fairseq_async.protocol import Layout, Push, Segment
from fairseq_async.records.event_log import EventLog, Settled
from fairseq_async.replay.replay import DifferenceError, Recording, Replay, quiet
from fairseq_async.server import ParameterServer
from fairseq_async.server.run import Recorder
from fairseq_async.worker.start.context import WorkerContext
from scripts.faults.sgd_server import build, sgd_spec
from tests.helpers.commands import MODEL, Processes, command
from tests.helpers.contract import fairseq_train
from tests.helpers.contract.net import Case, Net, Run
from tests.helpers.fairseq_trainers import HYBRID, configuration
from tests.helpers.replayed import HalvingRun, HalvingWorker
from tests.helpers.run_files import events

Record = Callable[..., Path]


@pytest.fixture(autouse=True)
def stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay changes to the run's directory."""
    monkeypatch.chdir(Path.cwd())


def launch(processes: Processes, data: Path, save_dir: Path, *flags: object) -> Path:
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--slowdown", "1,3", "--"]
    train = ["fairseq-train", data, *MODEL, "--record", "--save-dir", save_dir, *flags]
    code, output = processes.run([*launcher, *train])
    assert code == 0, output
    return save_dir


@pytest.fixture(scope="module")
def hybrid(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients of two batches each on average, some of them without those of a layer that was dropped in all; worker 0
    validates and saves in the midst of it, and epochs end."""
    with Processes() as processes:
        flags = ["--optimizer", "hybrid_async", "--update-freq", 2, "--max-update", 24, "--save-interval-updates", 10]
        flags += ["--encoder-layerdrop", 0.4, "--weight-decay", 0.01, "--shares", "auto"]
        for _ in range(3):  # on a busy machine one worker may have done all before the other is there
            run_dir = launch(processes, data, tmp_path_factory.mktemp("hybrid"), *flags)
            if {event["worker"] for event in events(run_dir)} == {0, 1}:
                break
        return run_dir


def replay(run_dir: Path, until: int | None = None) -> Replay:
    recording = Recording.read(run_dir)
    repeated = Replay(recording, FairseqRun(run_dir, recording.spec, recording.events))
    for _ in repeated.steps(until):
        pass
    return repeated


def test_a_hybrid_run_is_repeated_bit_for_bit(hybrid: Path) -> None:
    recorded = events(hybrid)
    assert {event["worker"] for event in recorded} == {0, 1} and max(
        event["position"]["epoch"] for event in recorded
    ) > 1
    assert len({event.get("missing") for event in recorded}) == 2
    repeated = replay(hybrid)
    last = recorded[-1]["version_after"]
    assert last >= 24, "as many whole steps were asked for, of which some may have come in parts"
    assert repeated.server.version == repeated.compared == last


def test_a_step_of_a_replay_has_the_batches_of_its_epoch() -> None:
    """--update-freq 1,2,4, in epochs of eight batches, the first two of which --curriculum does not shuffle."""

    class Epochs:
        epoch = 0
        next_epoch_idx = property(lambda epochs: epochs.epoch + 1)

        def next_epoch_itr(self, shuffle: bool, fix_batches_to_gpus: bool) -> CountingIterator:
            self.epoch += 1
            shuffled.append(shuffle)
            return CountingIterator(list(range(8)))

    epochs, shuffled, ignored = Epochs(), list[bool](), lambda *_: None
    data, ranks = SimpleNamespace(curriculum=2), SimpleNamespace(fix_batches_to_gpus=False)
    steps = SimpleNamespace(update_freq=[1, 2, 4], skip_remainder_batch=False)
    worker: Any = SimpleNamespace(
        cfg=SimpleNamespace(dataset=data, distributed_training=ranks, optimization=steps),
        trainer=SimpleNamespace(get_train_iterator=lambda *_, **__: epochs, begin_epoch=ignored, lr_step=ignored),
        task=SimpleNamespace(has_sharded_data=ignored),
    )
    drawn = [len(batches) for batches in islice(ReplayedWorker._draw(worker), 16)]
    assert drawn == [1] * 8 + [2] * 4 + [4] * 4 and shuffled == [False, False, True, True]


def test_in_a_replay_a_task_is_given_the_number_of_updates_from_which_its_worker_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task or a model may compute by it."""
    monkeypatch.setattr(fairseq_train, "_net", [Net(Run(Case(), "run", tmp_path, 0))])
    cfg, numbers = configuration(HYBRID), []
    names = ("local_steps", "shard", "offset", "progress", "progress_per_step", "micro_batches")
    first: Any = SimpleNamespace(sequence=0, **dict.fromkeys(names))
    spec = METHODS["hybrid_async"].describe(cfg.optimizer, cfg, 1)  # type: ignore[union-attr]
    worker = ReplayedWorker(cfg, spec, WorkerContext(), [first])
    for version in (2, 7):
        worker.start_from(torch.zeros(worker.layout.size), version)
        numbers.append(worker.trainer.get_num_updates())
    assert numbers == [2, 7]


LAYOUT = Layout((Segment("w", (3,), "float32"),))


def three() -> HalvingRun:
    return HalvingRun({worker: HalvingWorker(LAYOUT, weight=lambda n: 1.0 + n % 3) for worker in range(3)}, build)


def record(run_dir: Path, n: int, pushes: list[tuple[int, bool]]) -> Tensor:
    """Workers push in this order, and go on from what is published then, or ("early") still was during the step before,
    if their update came then and was only added to others. Returns the last parameters."""
    run, spec, parameters = three(), sgd_spec(updates_per_step=n, workers=3), torch.tensor([1.0, -2.0, 3.0])
    server = ParameterServer(parameters, build(spec, LAYOUT, parameters)[0])
    recorder, log = Recorder(run_dir, server, resumed=False), EventLog(run_dir, {}, "the beginning", 0.0)
    before, in_step = parameters.clone(), set[int]()  # whose pushes may have been accepted during the last step
    for worker in run.workers.values():
        worker.start_from(parameters, 0)
    for pusher, early in pushes:
        push, gradient = run.workers[pusher].compute()
        earlier = parameters.clone()
        receipt = server.push(Update(pusher, push.sequence, push.base_version, push.weight, gradient))
        added = recorder.of(Settled(receipt, push.report))
        log.write(0.0, receipt, push.report, added)
        if "checksum" in added:
            before, in_step = earlier, set(run.workers) - {pusher}
        pulled = (before, server.version - 1) if early and pusher in in_step else (parameters, server.version)
        run.workers[pusher].start_from(*pulled)
        in_step.discard(pusher)
    os.close(log._file)
    description = {"method": spec.to_json(), "layout": LAYOUT.to_json(), "workers": len(run.workers)}
    (run_dir / "run.json").write_text(json.dumps(description))
    return parameters


@example(n=2, pushes=[(1, False), *[(1, False), (0, True)] * 4])  # worker 0's come in one step after the other
@given(n=st.integers(1, 4), pushes=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=4, max_size=40))
def test_who_pulled_during_a_step_is_repeated_from_where_it_started(n: int, pushes: list[tuple[int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parameters = record(Path(folder), n, pushes)
        repeated = Replay(Recording.read(Path(folder)), three())
        assert list(repeated.steps()) == list(range(1, len(pushes) // n + 1))
    assert torch.equal(repeated.parameters, parameters)


def test_server_and_workers_compute_with_as_many_threads_as_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in another number of parts has other bits."""
    here = torch.get_num_threads()
    monkeypatch.setattr(HalvingRun, "threads", 2)
    torch.set_num_threads(3)
    try:
        record(tmp_path, 1, [(0, False), (1, False)])
    finally:
        torch.set_num_threads(here)
    seen, step, compute = list[tuple[str, int]](), SGD.step, HalvingWorker.compute

    def stepped(self: SGD) -> None:
        seen.append(("server", torch.get_num_threads()))
        step(self)

    def computed(self: HalvingWorker) -> tuple[Push, Tensor]:
        seen.append(("worker", torch.get_num_threads()))
        return compute(self)

    monkeypatch.setattr(SGD, "step", stepped)
    monkeypatch.setattr(HalvingWorker, "compute", computed)
    assert list(Replay(Recording.read(tmp_path), three()).steps()) == [1, 2]
    assert seen == [("worker", 2), ("server", 3)] * 2 and torch.get_num_threads() == here


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(["--outer", "diloco", "--local-steps", 4], id="DiLoCo"),
        pytest.param(
            ["--local-steps", 4, "--fragments", 2, "--fragment-delay", 1, "--compress", "e3m0,pull=int8"],
            id="compressed fragments with a delay",
        ),
        pytest.param(
            ["--local-steps", 4, "--fragments", 2, "--server-shards", 2, "--staleness-power", -0.5],
            id="fragments and weights of a server in shards",
        ),
        pytest.param(
            ["--local-steps", 3, "--compress", "topk:chunk=64,keep=8,pull=e3m0", "--delay-compensation", 0.5],
            id="changes of the parameters, with compensation",
        ),
        pytest.param(
            ["--local-steps", 4, "--dynamic-local-steps", "--grace-period", 0.01]
            + ["--staleness-power", -0.5, "--delay-compensation", 0.5],
            id="delayed Nesterov with dynamic steps, grace, weights and compensation",
        ),
    ],
)
def test_local_sgd_is_repeated_bit_for_bit(
    processes: Processes, data: Path, tmp_path: Path, method: list[object]
) -> None:
    run_dir = launch(processes, data, tmp_path, "--optimizer", "local_sgd", "--max-update", 12, "--no-save", *method)
    last = max(event["version_after"] for event in events(run_dir))
    repeated = replay(run_dir)
    assert repeated.server.version == last > 2
    assert repeated.compared == sum("checksum" in event for event in events(run_dir)) > 2


def test_a_replay_stops_at_the_update_that_was_asked_for(hybrid: Path) -> None:
    assert replay(hybrid, until=5).server.version == 5


def changed(run_dir: Path, copy: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    shutil.copytree(run_dir, copy)
    lines = events(copy)
    change(lines)
    (copy / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


@pytest.mark.parametrize(("key", "value"), [("checksum", "00000000"), ("norm", 1.5), ("version_after", 77)])
def test_the_first_update_that_differs_is_named(hybrid: Path, tmp_path: Path, key: str, value: Any) -> None:
    def spoil(lines: list[dict[str, Any]]) -> None:
        for line in [line for line in lines if "checksum" in line][6:]:
            line[key] = value

    with pytest.raises(DifferenceError, match="update (7|77) .* is the first that differs"):
        replay(changed(hybrid, tmp_path / "run", spoil))


def test_a_log_cut_in_the_middle_of_a_line_is_replayed_to_its_last_whole_one(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(hybrid, copy)
    log = copy / "events.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:9]) + '{"time": 17')
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "replay", str(copy)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out
    assert not ended.value.code and "ends in the middle of a line" in said
    assert "all equal to the recorded ones" in said


def test_a_worker_that_was_elsewhere_in_its_data_ends_the_replay_with_a_line(hybrid: Path, tmp_path: Path) -> None:
    def skip(lines: list[dict[str, Any]]) -> None:
        lines[5]["position"]["iterations_in_epoch"] += 2

    with pytest.raises(DifferenceError, match="worker was started again before it"):
        replay(changed(hybrid, tmp_path / "run", skip))


@pytest.mark.parametrize("number", [0, 5, 6])
def test_a_line_that_is_missing_is_named(hybrid: Path, tmp_path: Path, number: int) -> None:
    lost: list[dict[str, Any]] = []
    with pytest.raises(DifferenceError) as caught:
        replay(changed(hybrid, tmp_path / "run", lambda lines: lost.append(lines.pop(number))))
    said = f"events.jsonl has no line of update {lost[0]['sequence']} of worker {lost[0]['worker']}: a replay goes"
    assert said in str(caught.value)


def test_what_cannot_be_replayed_is_refused_in_one_line(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    shutil.copytree(hybrid, other)
    recorded = json.loads((other / "command.json").read_text())
    width = recorded["arguments"].index("--decoder-ffn-embed-dim") + 1
    recorded["arguments"][width] = "48"
    (other / "command.json").write_text(json.dumps(recorded))
    moved, away = tmp_path / "moved", tmp_path / "away"
    for run_dir, arguments, directory in (
        (moved, ["nowhere", *recorded["arguments"][1:]], recorded["directory"]),
        (away, recorded["arguments"], str(tmp_path / "gone")),
    ):
        shutil.copytree(hybrid, run_dir)
        (run_dir / "command.json").write_text(json.dumps(recorded | {"arguments": arguments, "directory": directory}))
    unrecorded = changed(
        hybrid, tmp_path / "plain", lambda lines: [line.pop("checksum", None) for line in lines] and None
    )
    alone = tmp_path / "alone"
    shutil.copytree(hybrid, alone)
    (alone / "start.pt").write_bytes(b"not a checkpoint")
    for run_dir, message in {
        tmp_path / "empty": "no run there",
        tmp_path / "nowhere": "no run there",
        unrecorded: "no checksums in events.jsonl",
        alone: "first state, cannot be read",
        moved: "nowhere, is not there any more",
        away: f"the run was started in {tmp_path / 'gone'} (No such file or directory): give as",
        other: "the recorded model is not this command's: its ",
    }.items():
        with pytest.raises(AsyncError) as caught:
            replay(run_dir)
        assert isinstance(caught.value, ConfigurationError)
        assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "method",
    [
        ["hybrid_async", "--compress", "adacomp,pull=bf16"],
        ["local_sgd", "--local-steps", 2, "--compress", "dqsgd:bits=6,pull=int8"],
        ["hybrid_async", "--compress", "e3m0,pull=int8", "--server-shards", 2],
    ],
    ids=["adacomp", "dqsgd", "in shards"],
)
def test_a_compressed_run_is_repeated_payload_by_payload(
    processes: Processes, data: Path, tmp_path: Path, method: list[object]
) -> None:
    run_dir = launch(processes, data, tmp_path, "--max-update", 10, "--no-save", "--optimizer", *method)
    recorded = events(run_dir)
    assert replay(run_dir).compared == recorded[-1]["version_after"] > 2
    assert len({event["payload"] for event in recorded}) == len(recorded)
    recording = Recording.read(run_dir)
    size, pull = recording.layout.size, recording.spec.compress.pull
    assert pull is not None and all(0 < event["bytes_sent"] < 4 * size / 3 for event in recorded)
    assert not any(event["bytes_received"] % compression.build(pull).most_bytes([size]) for event in recorded)
    # what is given of a version, or ahead of it, is the same for all workers
    given_at = {(event["base_version"], event.get("look_ahead"), event["start_payload"]) for event in recorded}
    assert len({key[:2] for key in given_at}) == len(given_at) and len({key[2] for key in given_at}) > 2
    lines = (run_dir / "events.jsonl").read_text()
    for key, said in (("payload", "of its payload"), ("start_payload", "of what it started from")):
        changed = "0" * 8 if recorded[1][key] != "0" * 8 else "1" * 8
        (run_dir / "events.jsonl").write_text(lines.replace(recorded[1][key], changed))
        with pytest.raises(DifferenceError, match=f"the checksum {said} was"):
            replay(run_dir)


def test_what_was_quiet_before_a_replay_is_quiet_behind_it() -> None:
    before = logging.root.manager.disable
    try:
        for level in (logging.INFO, logging.ERROR):
            logging.disable(level)
            with quiet():
                assert logging.root.manager.disable >= logging.WARNING
            assert logging.root.manager.disable == level
    finally:
        logging.disable(before)
