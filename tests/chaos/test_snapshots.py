"""A snapshot that is torn, late, or of a past that was taken back is not what the next server goes on from."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_async.server.run_files.snapshots import Snapshots
from fairseq_async.worker.client import Client
from scripts.faults.thread_server import ThreadServer
from tests.helpers.commands import ROOT
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.waiting import wait_until

SLOW = """
import os, sys, time
from pathlib import Path
import torch
from fairseq_async.server.run_files.snapshots import Snapshots

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
    snapshots.clear()
    assert not list(snapshots.directory.iterdir())


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
    assert "a snapshot could not be written; the run goes on without it" in capfd.readouterr().err
    assert not list(snapshots.directory.iterdir())


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_server_that_vanishes_in_the_handshake_is_noticed(tmp_path: Path) -> None:
    server = ThreadServer(1, tmp_path, "127.0.0.2")
    try:
        client = Client(server.address, server.token, 0)
        assert client._channel.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0
    finally:
        server.stop()
