"""A snapshot that is torn, late, or of a past that was taken back is not what the next server goes on from."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import RefusedError
from fairseq_async.protocol import (
    Hello,
    Initialise,
    Welcome,
)
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.adder import LAYOUT as ADDERS
from scripts.faults.sgd_server import build, sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.commands import ROOT
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, end, new_service
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.stand_ins import Clock, Time
from tests.helpers.waiting import wait_until

SLOW = """
import os, sys, time
from pathlib import Path
import torch
from fairseq_async.records.snapshots import Snapshots

def slow(state, file):
    print(os.getpid(), flush=True)
    time.sleep(2)
    file.write(b"late")

torch.save = slow
snapshots = Snapshots(Path(sys.argv[1]))
snapshots.take({}, 7)
time.sleep(60)
"""


def test_a_torn_snapshot_gives_up_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = InlineSnapshots(tmp_path)
    for version in (1, 3):
        snapshots.take({"version": version}, version)
    newest = snapshots.directory / "version-000000000003.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    found = snapshots.latest(lambda state: None)
    assert found is not None and found[1] == {"version": 1} and f"{newest} is skipped" in capsys.readouterr().err
    snapshots.take({"version": 2}, 2)
    names = sorted(path.name for path in snapshots.directory.iterdir())
    assert names == ["version-000000000001.pt", "version-000000000002.pt", "version-000000000003.torn"]
    snapshots.take({"version": 4}, 4)
    assert not list(snapshots.directory.glob("*.torn")), "there is a newer one"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\x80\x3f" * 64) + 17] ^= 4  # within the tensor, all of whose elements are 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    content = path.read_bytes()
    start = content.index(b"\x00\x00\x80\x3f" * 64)
    path.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [flip, zero, fifo, directory])
@pytest.mark.parametrize("resumes", [False, True], ids=["after a death", "the next run"])
def test_the_older_snapshot_is_used_where_the_newest_is_not_what_was_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    resumes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fairseq_async.records.state_files._PIECE", 1000)  # a checksum of several parts
    snapshots = InlineSnapshots(tmp_path)
    for version in (1, 2):
        snapshots.take({"version": version, "parameters": torch.ones(4096)}, version)
    newest = snapshots.directory / "version-000000000002.pt"
    spoil(newest)
    found = (snapshots.of_run_before if resumes else snapshots.latest)(lambda state: None)
    assert found is not None and found[1]["version"] == 1 and found[1]["parameters"].tolist() == [1.0] * 4096
    why = "it is no file" if spoil in (fifo, directory) else "its bytes do not match"
    assert f"{newest} is skipped: {why}" in capsys.readouterr().err
    snapshots.take({"version": 2}, 2) if spoil is not directory else None
    snapshots.take({"version": 3}, 3)
    snapshots.clear()
    assert not [path for path in snapshots.directory.iterdir() if path.is_file()]


def test_the_last_two_snapshots_stay_and_none_before_them(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    for version in (8, 9, 10, 11):
        snapshots.take({"version": version}, version)
    assert sorted(each.name for each in snapshots.directory.iterdir()) == [
        "version-000000000010.pt",
        "version-000000000011.pt",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_one_snapshot_is_written_at_a_time_and_a_failure_is_told_until_one_succeeds(
    tmp_path: Path, fails: bool
) -> None:
    told, gate, state = list[str](), tmp_path / "gate", {"version": 1}
    os.mkfifo(gate)
    snapshots = Snapshots(tmp_path, tell=told.append)

    def write(state: object, version: int) -> None:
        gate.read_bytes()
        if fails:
            raise OSError(28, "No space left on device")
        Snapshots._write(snapshots, {"version": version}, version)

    snapshots._write = write  # type: ignore[method-assign]
    assert not snapshots.busy and not snapshots.exist
    for version in (1, 2):
        snapshots.take(state, version)
        first = snapshots._child
        snapshots.take(state, 9)
        assert snapshots.busy and snapshots._child == first
        gate.write_bytes(b"go on")
        snapshots.wait()
        assert not snapshots.busy and snapshots.exist is not fails
    assert len(told) == fails
    found = snapshots.latest(lambda state: None)
    assert found is None if fails else found is not None and found[1]["version"] == 2
    if fails:
        snapshots._write = lambda state, version: None  # type: ignore[method-assign]
        snapshots.take(state, 3), snapshots.wait()
        snapshots._write = write  # type: ignore[method-assign]
        snapshots.take(state, 4), gate.write_bytes(b"go on"), snapshots.wait()
        assert len(told) == 2


def test_what_is_left_behind_is_removed_but_for_what_is_newer_than_all_that_is_whole(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.directory.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for version in (2, 3):
        snapshots.take({"version": version}, version)
    for version in (1, 2, 3, 4):
        (snapshots.directory / f"version-{version:012d}.torn").touch()
    for version in (5, 6):
        (snapshots.directory / f"version-{version:012d}.part").touch()
    assert snapshots.latest(lambda state: None) is not None and not list(snapshots.directory.glob("*.part"))
    (snapshots.directory / "version-000000000007.part").touch()
    snapshots.clear()
    assert [path.name for path in snapshots.directory.iterdir()] == ["version-000000000004.before"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_the_runs_before_the_one_that_was_interrupted_only_the_highest_version_stays(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.directory.mkdir()
    for version in (1, 5, 7):
        (snapshots.directory / f"version-{version:012d}.before").touch()
    for version in (2, 3):
        snapshots.take({"version": version}, version)
    snapshots.begin_anew()
    names = sorted(path.name for path in snapshots.directory.iterdir())
    assert names == ["version-000000000003.before", "version-000000000007.before"]


def test_a_snapshot_of_before_which_has_no_checksum_is_read(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.directory.mkdir()
    torch.save({"version": 1}, snapshots.directory / "version-000000000001.pt")
    found = snapshots.latest(lambda state: None)
    assert found is not None and found[1] == {"version": 1}


SCARCE = [
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."),
    MemoryError(),
    *(OSError(number, os.strerror(number)) for number in (errno.ENOMEM, errno.EMFILE, errno.EIO, errno.EACCES)),
]


@pytest.mark.parametrize("error", SCARCE, ids=lambda error: str(error)[:12] or "MemoryError")
@pytest.mark.parametrize("failures", [2, 100])
def test_a_snapshot_that_cannot_be_read_now_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, failures: int
) -> None:
    snapshots, left = InlineSnapshots(tmp_path), [failures]
    for version in (1, 2):
        snapshots.take({"version": version}, version)
    load = torch.load

    def fail(*given: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return load(*given, **options)

    monkeypatch.setattr(torch, "load", fail)
    time = Time()
    monkeypatch.setattr("fairseq_async.records.snapshots.time", time)
    if failures == 2:
        found = snapshots.latest(lambda state: None)
        assert found is not None and found[1] == {"version": 2}
    else:
        with pytest.raises(RefusedError, match="version-000000000002.pt cannot be read now: .*; it stays as it is"):
            snapshots.latest(lambda state: None)
    assert [path.suffix for path in snapshots.directory.iterdir()] == [".pt", ".pt"]
    assert time.pauses == [0.2, 0.4, 0.8, 1.6, 3.2][:failures]


def test_a_run_that_is_to_go_on_never_begins_anew_where_its_snapshots_are_broken(tmp_path: Path) -> None:
    """Neither does the run after it, and what is left of the snapshots stays."""
    (tmp_path / "snapshots").mkdir()
    for version in (1, 2):
        (tmp_path / "snapshots" / f"version-{version:012d}.pt").write_bytes(b"torn")
    for _ in range(2):
        service = new_service(1, tmp_path, build, lambda: 1000.0)
        service.resumes = True
        worker = Connection(service)
        worker.introduce(0)
        worker.ask(Hello(sgd_spec(workers=1), ADDERS, remote=False), Welcome)
        with pytest.raises(RefusedError, match="no snapshot in .* can be read, and there is no checkpoint"):
            worker.ask(Initialise(False), Welcome)
        end(service)
    assert [path.suffix for path in (tmp_path / "snapshots").iterdir()] == [".torn", ".torn"]
    snapshots = InlineSnapshots(tmp_path)
    snapshots.begin_anew()
    assert [path.suffix for path in (tmp_path / "snapshots").iterdir()] == [".before", ".before"]
    snapshots.give_back()
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["before", "pt"], "the newest can be repaired, and is next"


def test_what_writes_a_snapshot_holds_no_connection_open_that_the_server_has_closed(tmp_path: Path) -> None:
    snapshots, (ours, theirs) = Snapshots(tmp_path), socket.socketpair()
    snapshots._write = lambda state, version: time.sleep(60.0)  # type: ignore[method-assign]
    snapshots.take({}, 7)
    ours.close()
    try:
        with theirs:
            theirs.settimeout(20.0)
            assert theirs.recv(1) == b"" and snapshots.busy
    finally:
        os.kill(snapshots._child, signal.SIGKILL)
        snapshots.wait()


def test_what_writes_a_snapshot_dies_with_its_server(tmp_path: Path) -> None:
    """Else the next server, which has taken back what came after an older one, would find it there one day."""
    with subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        server.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
    assert [path.suffix for path in Snapshots(tmp_path).directory.iterdir()] == [".part"]


def test_a_disk_that_is_full_costs_a_snapshot_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    snapshots = Snapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    wait_until(lambda: not snapshots.busy)
    where = f"the disk is full; make room in {snapshots.directory}"
    assert f"a snapshot could not be written: {where}; the run goes on without it" in capfd.readouterr().err
    assert not list(snapshots.directory.iterdir())


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_server_that_vanishes_in_the_handshake_is_noticed(tmp_path: Path) -> None:
    with ThreadServer(1, tmp_path, "127.0.0.2") as server:
        client = Client(LastingConnection(server.address, server.token, 0))
        assert client.connection.channel.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0


def test_a_snapshot_is_its_owners_alone(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    assert [path.stat().st_mode & 0o777 for path in snapshots.directory.iterdir()] == [0o600]


def test_a_snapshot_that_cannot_be_read_back_replaces_nothing(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    with suppress(Exception):
        snapshots.take({"version": 2, "position": Path("no plain data")}, 2)
    assert [path.name for path in snapshots.directory.iterdir()] == ["version-000000000001.pt"]


def test_a_snapshot_of_another_run_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (InlineSnapshots(tmp_path, run=run) for run in ("ours", "theirs"))
    ours.take({"version": 1}, 1)
    theirs.take({"version": 9}, 9)
    (ours.directory / "version-000000000005.part").write_text("torn by a kill -9 before it got its name")
    found = ours.latest(lambda state: None)
    assert found is not None and found[1] == {"version": 1}
    assert "version-000000000009.pt is skipped: it is of another run" in capsys.readouterr().err
    assert sorted(path.name for path in ours.directory.iterdir()) == [
        "version-000000000001.pt",
        "version-000000000009.other",
    ]


def test_a_worker_is_told_of_parameters_when_the_first_snapshot_is_on_the_disk(tmp_path: Path) -> None:
    """The disk needs two seconds. A server that died within them would begin anew, without the parameters."""
    server = ServerProcess("tests.helpers.halving", 1, tmp_path, tmp_path / "server.log")
    try:
        client = Client(LastingConnection(server.address, server.token, 0))
        client.join(LAYOUT, halving_spec())
        client.slot.fill_(3.0)
        assert client.initialise(None).initialised
        (path,) = (tmp_path / "snapshots").iterdir()
        assert path.name == "version-000000000000.pt"
        assert torch.load(path, weights_only=True)["server"]["parameters"].tolist() == [3.0] * LAYOUT.size
        client.leave(finished=True)
    finally:
        server.stop()


def test_file_and_directory_are_brought_to_the_disk_around_the_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the power could fail and leave the new name with nothing in it, or not leave the new name."""
    fsync, log = os.fsync, tmp_path / "log"

    def noting(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        there = sorted(each.name for each in (tmp_path / "snapshots").iterdir())
        fsync(descriptor)
        with log.open("a") as file:  # a child of this process writes the snapshot
            print(path.name, path.stat().st_size > 0, *there, file=file)

    monkeypatch.setattr(os, "fsync", noting)
    snapshots = Snapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    snapshots.wait()
    part, whole = "version-000000000001.part", "version-000000000001.pt"
    assert log.read_text().splitlines() == [f"{part} True {part}", f"snapshots True {whole}"]


class Noted(Snapshots):
    """Notes what it would write."""

    def take(self, state: dict[str, int], version: int) -> None:
        self.taken = [*getattr(self, "taken", []), version]


def test_snapshots_are_as_far_apart_as_was_asked(tmp_path: Path) -> None:
    """A version a second, and 12 seconds between two."""
    clock = Clock(0.0)
    snapshots = Noted(tmp_path, clock)
    for version in range(28):
        clock.now = float(version)
        snapshots.keep_up(dict, version, 12.0)
    assert snapshots.taken == [0, 12, 24]
    clock.now = 1000.0
    snapshots.keep_up(dict, 24, 12.0)
    assert snapshots.taken == [0, 12, 24], "nothing has changed since the last"
