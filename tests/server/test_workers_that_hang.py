"""A worker or a server that is stopped or hangs costs the others nothing."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fairseq_async.protocol import (
    Alive,
    Leave,
    Push,
    Report,
    Status,
)
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers import halving, in_process
from tests.helpers.commands import Processes, launch_command
from tests.helpers.halving import begun, hello, layout
from tests.helpers.in_process import Connection, new_service
from tests.helpers.launched import count, worker_of
from tests.helpers.run_files import events
from tests.helpers.server_client import SGD_SERVER, StartServer, join, push
from tests.helpers.waiting import wait_until


def stopped(pid: int) -> bool:
    return " T " in Path(f"/proc/{pid}/stat").read_text()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stopped(pid))


def test_a_server_that_was_stopped_reads_what_has_come_before_it_judges_anybody_silent(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Both updates of a round are there, and nobody could be heard for three times the limit."""
    server = start_server(workers=2)
    first, second = (join(server, worker, barrier=2, worker_timeout=1.0) for worker in (0, 1))
    stop(server.process.pid)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(push, client, 0, 0.5) for client in (first, second)]
        threading.Event().wait(3)
        os.kill(server.process.pid, signal.SIGCONT)
        assert [answer.result(20).status for answer in answers] == [Status.APPLIED] * 2
    assert [event["base_version"] + event["staleness"] for event in events(tmp_path)] == [0, 0], "one round"


def test_a_run_that_is_finished_ends_without_a_worker_that_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(SGD_SERVER, 2, tmp_path, tmp_path / "server.log")
    try:
        worker = join(server, 0, last_version=1, worker_timeout=1.0)
        hangs = join(server, 1, last_version=1, worker_timeout=1.0)
        hangs.connection.left.set()  # its signs of life end
        push(worker, 0, 0.5)
        worker.leave(finished=True)
        server.join(15)
        assert server.poll() == 0
    finally:
        server.stop()
    wait_until(lambda: "worker 1 was not heard of for 1 s" in capfd.readouterr().err)


class Ending:
    """A run of two workers that is finished by an update of worker 0, which has left; worker 1 is at work."""

    def __init__(self, run_dir: Path, listener: socket.socket) -> None:
        self.now, self.said = 0.0, list[str]()
        run_dir.mkdir()
        service = new_service(2, run_dir, halving.build, lambda: self.now)
        service.tell = self.said.append
        changes = {"updates_per_step": 1, "last_version": 2}
        first, self.second = begun(service, **changes), Connection(service)
        self.second.introduce(1)
        hello(self.second, layout(), **changes)
        self.now = 100.0
        for sequence, connection in enumerate((self.second, first)):
            in_process.slot(service, connection.peer.id).zero_()
            connection.send(Push(0, sequence, 1.0, Report()))
        first.send(Leave(finished=True))
        self._loop = EventLoop(listener, service, listener.dup())
        self._loop.peers = [self.second.peer]
        assert not self._loop._over()

    def is_over(self, now: float) -> bool:
        """Whether the run ends by then; worker 1 has shown life all the time."""
        while self.now < now:
            self.now = min(now, self.now + 15.0)
            self.second.send(Alive())
            if self._loop._over():
                return True
        return self._loop._over()


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Ending]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Ending(tmp_path / "run", listener)


def test_a_run_that_is_finished_ends_without_a_worker_that_hangs_and_shows_life(ending: Ending) -> None:
    """Its update has taken 100 seconds: it may take four times as long once more."""
    assert not ending.is_over(500.0)
    assert ending.is_over(501.0)
    assert ending.said == ["worker 1 has asked for nothing for 401 s: the run ends without it"]


def test_what_a_worker_does_that_knows_of_the_end_is_its_own(ending: Ending) -> None:
    """As an evaluation: nobody can know how long that takes."""
    assert ending.second.send(Push(1, 1, 1.0, Report())) and ending.second.last["status"] == "finished"
    assert not ending.is_over(5000.0)


def test_a_server_that_was_stopped_takes_nobody_for_one_that_hangs(ending: Ending) -> None:
    assert not ending.is_over(101.0)
    ending.now = 3000.0
    ending._loop._excuse_silence(101.0, 0.0)
    assert not ending.is_over(3300.0)


def test_the_launcher_ends_a_run_without_a_worker_that_hangs(processes: Processes, data: Path, tmp_path: Path) -> None:
    flags = ["--max-update", 200, "--disable-validation", "--worker-timeout", 3]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    stop(worker_of(tmp_path, 1))
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, output
    assert "worker 1 was not heard of for 3 s" in output and "worker 1 did not end with the run" in output
    assert (tmp_path / "checkpoint_last.pt").exists()
