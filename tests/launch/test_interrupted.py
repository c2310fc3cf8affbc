"""Ctrl-C keeps what was done: the same command goes on from there, as if nothing had been."""

import os
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.interrupted import what_is_kept
from fairseq_async.launch.launcher import Launcher
from fairseq_async.launch.options import LaunchOptions
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.method.spec import OPTIMIZER_OVERRIDES, JsonObject
from fairseq_async.protocol.work import DRAWN
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.reporting.audit import audit
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.rendezvous import ServerRequest
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from tests.helpers.commands import Processes, launch_command
from tests.helpers.launched import count
from tests.helpers.run_files import events, load, relative_differences, snapshot_versions
from tests.helpers.server_client import LAYOUT, SGD_SERVER, pull, push
from tests.helpers.waiting import wait_until

TO_40 = ["--barrier", "--max-update", 40, "--disable-validation", "--no-epoch-checkpoints"]


def test_a_run_that_is_interrupted_goes_on_by_the_same_command_and_no_bit_differs(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """The interruption falls between two checkpoints, with dropout on and Adam's moments warm."""
    straight = processes.start(launch_command(data, 2, tmp_path / "straight", *TO_40))
    output, _ = straight.communicate(timeout=120)
    assert straight.returncode == 0, output
    command = launch_command(data, 2, tmp_path / "parts", *TO_40, launcher=["--slowdown", "12,12"])
    first = processes.start(command)
    wait_until(lambda: count(tmp_path / "parts", 0) >= 12, 120)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "Traceback" not in output, output
    (kept,) = snapshot_versions(tmp_path / "parts")[-1:]
    assert f"all is kept up to update {kept} of 40, epoch" in output and "; go on with: fairseq-async launch" in output
    assert events(tmp_path / "parts")[-1]["version_after"] == kept < 40
    code, output = processes.run(launch_command(data, 2, tmp_path / "parts", *TO_40))
    assert code == 0 and f"the run goes on from version-{kept:012d}.pt" in output, output
    ends = [tmp_path / name / "checkpoint_last.pt" for name in ("straight", "parts")]
    assert set(relative_differences(*ends).values()) == {0.0}
    states = [load(end)["last_optimizer_state"] for end in ends]
    assert (
        states[0]["server"]["sequences"] == states[1]["server"]["sequences"] and states[0]["plan"] == states[1]["plan"]
    )
    moments = [state["server"]["rule"]["optimizer"]["state"][0]["exp_avg_sq"] for state in states]
    assert torch.equal(*moments) and audit(tmp_path / "parts").rolled_back.total() == 0


def begin(
    run_dir: Path,
    first: float,
    state: Path | None = None,
    workers: int = 2,
    resumes: bool = True,
    framework: JsonObject | None = None,
) -> tuple[ServerProcess, Client]:
    """A server that goes on where it can, and its worker, which brings these parameters or this state."""
    process = ServerProcess(SGD_SERVER, workers, run_dir, run_dir / "server.log", resumes=resumes)
    client = Client(LastingConnection(process.address, process.token, 0))
    client.join(LAYOUT, sgd_spec(workers=workers, framework=framework or {}))
    client.slot.fill_(first)
    client.initialise(None if state is None else str(state))
    return process, client


def interrupted_after(run_dir: Path, updates: int, save_at: int, state: Path | None = None, **report: object) -> None:
    """Updates from 1.0 or a state; the state is saved, as for a checkpoint, after some of them."""
    process, client = begin(run_dir, 1.0, state)
    before = pull(client)[0]
    for sequence in range(before, before + updates):
        push(client, sequence, 0.5, **report)
        if sequence + 1 == save_at:
            client.save_state(str(run_dir.parent / "saved.pt"))
    process.end(30)


@pytest.mark.parametrize(("updates", "version"), [(5, 5), (3, 3)], ids=["snapshot", "equally new"])
def test_the_next_run_goes_on_from_whatever_is_newer(tmp_path: Path, updates: int, version: int) -> None:
    interrupted_after(tmp_path / "run", updates, save_at=3)
    process, client = begin(tmp_path / "run", 9.0, tmp_path / "saved.pt")
    try:
        assert pull(client)[0] == version
        source = "snapshot" if version > 3 else "a checkpoint"
        assert f"the run begins at version {version}, from {source}" in (tmp_path / "run" / "server.log").read_text()
    finally:
        process.stop()


@pytest.mark.parametrize("updates", [5, 3], ids=["snapshot", "checkpoint"])
def test_the_users_overrides_of_the_optimizer_hold_for_whatever_is_gone_on_from(tmp_path: Path, updates: int) -> None:
    """The rate was 1."""
    interrupted_after(tmp_path / "run", updates, save_at=3)
    overrides: JsonObject = {OPTIMIZER_OVERRIDES: {"lr": 0.25}}
    process, client = begin(tmp_path / "run", 9.0, tmp_path / "saved.pt", framework=overrides)
    try:
        before = pull(client)[1]
        push(client, updates, 0.5)
        assert pull(client)[1] == before - 0.25 * 0.5
    finally:
        process.end(30)
    process, client = begin(tmp_path / "run", 9.0)
    try:
        before = pull(client)[1]
        push(client, updates + 1, 0.5)
        assert pull(client)[1] == before - 0.25 * 0.5  # they have become part of the state
    finally:
        process.stop()


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_gone_on_from(tmp_path: Path) -> None:
    interrupted_after(tmp_path / "other", 6, save_at=6)
    interrupted_after(tmp_path / "run", 2, save_at=0)
    process, client = begin(tmp_path / "run", 9.0, tmp_path / "saved.pt")
    try:
        assert pull(client)[0] == 6 and snapshot_versions(tmp_path / "run") == [6]
    finally:
        process.stop()


def test_a_server_that_dies_before_worker_0_has_come_leaves_the_snapshot_of_the_run_before(tmp_path: Path) -> None:
    interrupted_after(tmp_path / "run", 4, save_at=0)
    process = ServerProcess(SGD_SERVER, 2, tmp_path / "run", tmp_path / "log", restarts=1, resumes=True)
    first = process.process
    first.kill()
    try:
        wait_until(lambda: process.process is not first, 60)
        client = Client(LastingConnection(process.address, process.token, 0))
        client.join(LAYOUT, sgd_spec(workers=2))
        client.initialise(None)
        assert pull(client)[0] == 4
    finally:
        process.stop()


def test_places_in_the_data_of_another_number_of_workers_are_set_aside(tmp_path: Path) -> None:
    interrupted_after(tmp_path / "run", 4, save_at=0)
    process, client = begin(tmp_path / "run", 9.0, workers=3)
    try:
        assert pull(client) == (0, 9.0)
        (aside,) = (tmp_path / "run" / "snapshots").glob("*.other")
        said = (tmp_path / "run" / "server.log").read_text()
        assert f"{aside.stem}.pt is set aside as .other: it is of 2 workers, each at its place" in said
    finally:
        process.stop()


@pytest.mark.parametrize(("workers", "position"), [(1, None), (3, None), (1, {DRAWN: 8}), (3, {DRAWN: 8})])
def test_another_number_of_workers_goes_on_where_no_places_in_the_data_were_kept(
    tmp_path: Path, workers: int, position: JsonObject | None
) -> None:
    """As in scripts, which divide their data themselves, or in which the server deals the batches."""
    interrupted_after(tmp_path / "run", 4, save_at=0, position=position)
    process, client = begin(tmp_path / "run", 9.0, workers=workers)
    try:
        version, value = pull(client)
        assert version == 4
        push(client, 4, 0.5, position=None)
        assert pull(client) == (5, pytest.approx(value - 0.5))
    finally:
        process.stop()
    assert audit(tmp_path / "run").rolled_back.total() == 0


def test_a_run_that_begins_anew_keeps_the_interrupted_ones_last_and_highest_state(tmp_path: Path) -> None:
    """Of four runs with 4, 3, 2 and 1 updates, of which the last three began anew, those of 4 and of 1 stay."""
    snapshots = tmp_path / "run" / "snapshots"
    interrupted_after(tmp_path / "run", 4, save_at=0)
    for before, updates in ((4, 3), (3, 2), (2, 1)):
        process, client = begin(tmp_path / "run", 9.0, resumes=False)
        assert pull(client) == (0, 9.0)
        said = (tmp_path / "run" / "server.log").read_text()
        assert f"this run begins anew; {snapshots}/version-00000000000{before}.before is kept" in said
        for sequence in range(updates):
            push(client, sequence, 0.5)
        process.end(30)
    Snapshots(tmp_path / "run").begin_anew()
    last, highest = sorted(snapshots.glob("*"))
    assert (last.name, highest.name) == ("version-000000000001.before", "version-000000000004.before")
    highest.rename(highest.with_suffix(".pt"))
    process, client = begin(tmp_path / "run", 9.0)
    try:
        assert pull(client)[0] == 4
    finally:
        process.stop()


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_began_anew_and_has_trained_nothing_gives_the_snapshot_back(tmp_path: Path, begun: bool) -> None:
    """As where --resume was forgotten, which its user sees from the line and interrupts."""
    interrupted_after(tmp_path, 3, save_at=0)
    if begun:
        process, _ = begin(tmp_path, 9.0, resumes=False)
    else:
        process = ServerProcess(SGD_SERVER, 2, tmp_path, tmp_path / "server.log")
        wait_until(lambda: "this run begins anew" in (tmp_path / "server.log").read_text())
    process.end(30)
    process, client = begin(tmp_path, 9.0)
    try:
        assert pull(client)[0] == 3
    finally:
        process.stop()


@pytest.mark.parametrize("content", [{}, [1], torch.zeros(2), {"server": {}, "spec": {}, "layout": []}])
def test_a_file_that_is_no_snapshot_is_skipped(
    tmp_path: Path, content: object, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted_after(tmp_path / "run", 3, save_at=3)
    torch.save(content, tmp_path / "run/snapshots/version-000000000009.pt")
    process, client = begin(tmp_path / "run", 9.0)
    try:
        assert pull(client)[0] == 3
    finally:
        process.stop()
    assert "version-000000000009.pt is skipped: " in capfd.readouterr().err


def test_a_server_whose_starter_is_killed_writes_its_last_snapshot_too(
    tmp_path: Path,
) -> None:
    """Nobody is there to tell it: its standard input ends."""
    process, client = begin(tmp_path / "run", 1.0)
    for sequence in range(3):
        push(client, sequence, 0.5)
    assert process.process.stdin is not None
    process._stopping.set()  # a starter that is killed starts nothing again
    process.process.stdin.close()
    assert process.process.wait(30) == 0 and snapshot_versions(tmp_path / "run")[-1] == 3
    process.stop()


def test_a_process_that_was_forked_from_the_starter_does_not_keep_the_server_from_its_last_snapshot(
    tmp_path: Path,
) -> None:
    """As a data loader's has, it has the server's standard input open."""
    process, client = begin(tmp_path / "run", 1.0)
    push(client, 0, 0.5)
    assert process.process.stdin is not None
    held = os.dup(process.process.stdin.fileno())
    try:
        process.end(30)
        assert process.process.returncode == 0 and snapshot_versions(tmp_path / "run")[-1] == 1
    finally:
        os.close(held)
        process.stop()


def test_a_run_that_is_interrupted_before_its_first_update_keeps_nothing(tmp_path: Path) -> None:
    """The next one would begin with its parameters, whatever its seed."""
    interrupted_after(tmp_path / "run", 0, save_at=0)
    assert snapshot_versions(tmp_path / "run") == []
    process, client = begin(tmp_path / "run", 9.0)
    try:
        assert pull(client) == (0, 9.0)
    finally:
        process.stop()


def said_to_be_kept(run_dir: Path, command: Any, version: int = 3) -> str:
    progress = SimpleNamespace(
        poll=lambda: None, updates=Counter({0: 3}), version=version, position="update 2 of 9", begun=True
    )
    return what_is_kept(cast(Progress, progress), run_dir, CreatedFiles(run_dir), command)


def test_an_interrupt_after_the_runs_end_promises_no_snapshot(tmp_path: Path) -> None:
    command = SimpleNamespace(rendezvous=None, resumes=True)
    assert said_to_be_kept(tmp_path, command).startswith("no snapshot is left: the run was finished")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "version-000000000003.pt").touch()
    assert said_to_be_kept(tmp_path, command).startswith("all is kept up to update 2 of 9; go on with")
    assert said_to_be_kept(tmp_path, command, version=0).startswith("all is kept up to version 3; go on with")


def test_a_last_snapshot_that_was_not_written_is_not_promised(tmp_path: Path) -> None:
    """As on a full disk: the one before is there."""
    (tmp_path / "snapshots").mkdir()
    for version in (2, 3):
        (tmp_path / "snapshots" / f"version-{version:012d}.pt").touch()
    said = said_to_be_kept(tmp_path, SimpleNamespace(rendezvous=None, resumes=True), version=1007)
    assert said.startswith("the last snapshot was not written: version 3 is kept, of 1,007; go on with: ")


def test_the_command_to_go_on_with_does_not_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags by which this run began, a server would remove the snapshot that is promised."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "version-000000000003.pt").touch()
    job = ["fairseq-train", "data", "--optimizer", "hybrid_async", "--save-dir", str(tmp_path)]
    begins, tunes = ["--restore-file", "x.pt", "--reset-optimizer", "--reset-dataloader"], "--finetune-from-model=y.pt"
    line = ["fairseq-async", "launch", "--workers", "2", "--"]
    monkeypatch.setattr(sys, "argv", [*line, *job, *begins, tunes, "--lr", "1"])
    command = WorkerCommand([*job, *begins, tunes, "--lr", "1"])
    assert not command.resumes
    again = shlex.split(said_to_be_kept(tmp_path, command).split("go on with: ")[1])
    assert again == [*line, *job, tunes, "--lr", "1"]
    assert WorkerCommand(again[5:]).resumes


def test_a_script_that_has_nothing_to_go_on_from_is_said_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a run that was finished: its parameters are trained again from the first step."""
    said: list[str] = []
    launcher = cast(Any, Launcher.__new__(Launcher))
    launcher.tls, launcher.options = None, LaunchOptions(1, max_restarts=0)
    launcher.display = SimpleNamespace(say=said.append)
    launcher.command = SimpleNamespace(rendezvous=object(), resumes=True, given=["train.py"])
    server = SimpleNamespace(token_file=tmp_path / ".token", address="127.0.0.1:1")
    monkeypatch.setattr(launcher, "_new_server", lambda _: server)
    launcher._start_server(ServerRequest("module", str(tmp_path), None))
    assert said[0] == f"--resume: no run was interrupted in {tmp_path}; this one begins at its beginning"
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "version-000000000003.pt").touch()
    launcher._start_server(ServerRequest("module", str(tmp_path), None))
    assert len(said) == 3 and "--resume" not in said[2]
