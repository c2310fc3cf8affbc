"""When a server that ends with its workers ends, and what it leaves for the run that was to go on."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fairseq_async.server import program
from fairseq_async.server.global_service import GlobalService
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.protocol import Hello, Initialise, Leave, Push, Report, Welcome
from fairseq_async.server.run_files.state_files import ending_path
from fairseq_async.server.service import Service
from tests.helpers import halving
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, new_service, slot, take_snapshot


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A service and its event loop, whose clock a test moves."""

    def __init__(self, run_dir: Path, kind: type[Service] = Service) -> None:
        self.clock = Clock()
        self.service = new_service(2, run_dir, halving.build, self.clock, kind)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.lifeline = socket.socketpair()
        self.loop = EventLoop(self.listener, self.service, self.lifeline[0], ends_with_workers=True)

    def close(self) -> None:
        for each in (self.listener, *self.lifeline):
            each.close()

    def over_at(self, seconds: float) -> bool:
        self.clock.now = 1000.0 + seconds
        return self.loop._over()

    def enter(self, worker: int) -> Connection:
        connection = Connection(self.service)
        connection.introduce(worker)
        spec = halving_spec(1, waits_for_dead=False, worker_timeout=60.0)
        if not connection.ask(Hello(spec, LAYOUT, remote=False), Welcome).initialised:
            slot(self.service, 0).zero_()
            connection.ask(Initialise(False), Welcome)
        return connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with closing(Server(tmp_path)) as server:
        yield server


@pytest.mark.parametrize("loading", [False, True], ids=["nobody has come", "workers load their data"])
def test_a_server_waits_for_its_first_workers_however_late_they_are(
    server: Server, tmp_path: Path, loading: bool
) -> None:
    """They may wait in a scheduler's queue; the snapshots of the run that is to go on stay in any case."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "version-000000000500.pt").touch()
    if loading:
        for worker in (0, 1):
            Connection(server.service).introduce(worker, instance=str(worker))
    assert not server.over_at(601.0) and not server.over_at(100_000.0)
    program._finish(server.service)
    assert (tmp_path / "snapshots" / "version-000000000500.pt").exists()


def test_a_connection_that_breaks_does_not_end_the_run_of_the_last_worker(server: Server) -> None:
    first, last = server.enter(0), server.enter(1)
    slot(server.service, 1).fill_(1.0)
    last.send(Push(0, 0, 1.0, Report()))
    take_snapshot(server.service)
    first.send(Leave(False))
    first.close()
    assert not server.over_at(1.0)
    last.close()  # without a word
    assert not server.over_at(30.0) and server.over_at(62.0)
    back = server.enter(1)
    assert not server.over_at(63.0)
    back.send(Leave(False))
    assert server.over_at(64.0)


def test_a_global_server_waits_for_its_regions_however_long_their_line_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on meanwhile, and try to reach it for as long as they run."""
    with closing(Server(tmp_path, GlobalService)) as server:
        told: list[str] = []
        monkeypatch.setattr(server.service, "tell", told.append)
        regions = [server.enter(0), server.enter(1)]
        for region in regions:
            region.close()  # without a word
        assert not server.over_at(62.0) and not server.over_at(100_000.0)
        assert told == ["no region is connected any more: the run waits until one is back, or until Ctrl-C"]
        server.enter(1).send(Leave(False))
        assert server.over_at(100_001.0)  # region 0 is away for longer than the timeout: it may have died


def test_the_next_run_waits_until_the_one_before_is_gone(server: Server, tmp_path: Path) -> None:
    """Its last snapshot is written before its process has ended, which holds the directory until then."""
    server.enter(0)
    server.enter(1).send(Push(0, 0, 1.0, Report()))
    program._keep(server.service, asked=True)
    assert ending_path(tmp_path).exists() and list(tmp_path.glob("snapshots/version-*.pt"))


@pytest.mark.parametrize("asked", [True, False])
def test_before_the_first_update_only_a_server_that_was_asked_to_end_keeps_nothing(
    server: Server, tmp_path: Path, asked: bool
) -> None:
    """A Ray actor that dies with its node is made again on another one, and its workers have these parameters."""
    server.enter(0)
    take_snapshot(server.service)
    program._keep(server.service, asked)
    assert bool(list(tmp_path.glob("snapshots/version-*.pt"))) != asked


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_where_no_file_can_be_made_for_the_next_run_a_last_snapshot_is_still_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, which may have room again a moment later."""
    server.enter(0).send(Push(0, 0, 1.0, Report()))
    monkeypatch.setattr(Path, "touch", refuse)
    program._keep(server.service, asked=True)
    assert list(tmp_path.glob("snapshots/version-*.pt"))


def test_a_finished_run_whose_directory_has_become_read_only_ends_with_a_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise count as a server that has died, and be started again."""
    said: list[str] = []
    monkeypatch.setattr(server.service, "tell", said.append)
    first = server.enter(0)
    first.send(Push(0, 0, 1.0, Report()))
    first.send(Leave(True))
    take_snapshot(server.service)
    monkeypatch.setattr(Path, "unlink", refuse)
    program._finish(server.service)
    (line,) = said
    assert "cannot be removed: " in line and "remove " in line and "\n" not in line


def test_a_server_that_was_started_again_ends_when_nobody_comes_back(tmp_path: Path) -> None:
    """Its last worker has died with the server before, and worker 0 waits for this one's end."""
    with closing(Server(tmp_path)) as before:
        before.enter(0).send(Leave(False))
        worker = before.enter(1)
        slot(before.service, 1).fill_(1.0)
        worker.send(Push(0, 0, 1.0, Report()))
        take_snapshot(before.service)
    with closing(Server(tmp_path)) as server:
        server.service.recover()
        assert not server.over_at(30.0) and server.over_at(62.0)


def test_a_server_that_cannot_go_on_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it again names the reason, as of a full disk."""
    with closing(Server(tmp_path)) as before:
        before.enter(0).send(Push(0, 0, 1.0, Report()))
        take_snapshot(before.service)
    reader, writer = os.pipe()
    with closing(Server(tmp_path)) as server, open(reader) as report:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(server.service, "recover", lambda: raise_(full))
        with pytest.raises(SystemExit):
            program._recover(server.service, writer)
        assert report.read() == "error: [Errno 28] No space left on device"


def raise_(error: Exception) -> None:
    raise error
