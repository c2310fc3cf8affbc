"""A snapshot is on the disk before anybody relies on it."""

import os
from pathlib import Path

import pytest
import torch

from fairseq_async.records.snapshots import Snapshots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.halving import LAYOUT, halving_spec


def test_a_worker_is_told_of_parameters_when_the_first_snapshot_is_on_the_disk(tmp_path: Path) -> None:
    """The disk needs two seconds. A server that died within them would begin anew, without the parameters."""
    server = ServerProcess("tests.helpers.halving", 1, tmp_path, tmp_path / "server.log")
    try:
        client = Client(server.address, server.token, 0)
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Noted(Snapshots):
    """Notes what it would write."""

    def take(self, state: dict[str, int], version: int) -> None:
        self.taken = [*getattr(self, "taken", []), version]


def test_snapshots_are_as_far_apart_as_was_asked(tmp_path: Path) -> None:
    """A version a second, and 12 seconds between two."""
    clock = Clock()
    snapshots = Noted(tmp_path, clock)
    for version in range(28):
        clock.now = float(version)
        snapshots.keep_up(dict, version, 12.0)
    assert snapshots.taken == [0, 12, 24]
    clock.now = 1000.0
    snapshots.keep_up(dict, 24, 12.0)
    assert snapshots.taken == [0, 12, 24], "nothing has changed since the last"
