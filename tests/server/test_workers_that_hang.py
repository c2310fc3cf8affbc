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
    WaitForWork,
)
from fairseq_async.server.membership import Membership
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
        for sequence, connection in enumerate((self.second, first)):
            self.now = 100.0 + 10.0 * sequence
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
    assert not ending.is_over(510.0)
    assert ending.is_over(511.0)
    assert ending.said == ["worker 1 has asked for nothing for 401 s: the run ends without it"]


@pytest.mark.parametrize("asks", [Push(1, 1, 1.0, Report()), WaitForWork(for_end=True)], ids=["sends", "waits"])
def test_what_a_worker_does_that_knows_of_the_end_is_its_own(ending: Ending, asks: Push | WaitForWork) -> None:
    """As an evaluation: nobody can know how long that takes."""
    assert ending.second.send(asks) and ending.second.last["finished"]
    assert ending.second.last.get("status") == ("finished" if isinstance(asks, Push) else None)
    assert not ending.is_over(5000.0)


def test_so_is_what_a_worker_does_that_comes_back_to_a_finished_run(ending: Ending) -> None:
    ending.second.close()
    ending.second = Connection(ending.second.service)
    ending.second.introduce(1)
    assert hello(ending.second, layout(), updates_per_step=1, last_version=2) and ending.second.last["finished"]
    ending._loop.peers = [ending.second.peer]
    assert not ending.is_over(5000.0)


def test_a_server_that_was_stopped_takes_nobody_for_one_that_hangs(ending: Ending) -> None:
    assert not ending.is_over(111.0)
    ending.now = 3000.0
    ending._loop._excuse_silence(111.0, 0.0)
    assert not ending.is_over(3300.0)


def test_the_launcher_ends_a_run_without_a_worker_that_hangs(processes: Processes, data: Path, tmp_path: Path) -> None:
    flags = ["--max-update", 60, "--disable-validation", "--worker-timeout", 3]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags, launcher=["--slowdown", "5,5"]))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    stop(worker_of(tmp_path, 1))
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, output
    assert "worker 1 was not heard of for 3 s" in output and "worker 1 did not end with the run" in output
    assert (tmp_path / "checkpoint_last.pt").exists()


def members(later: float) -> Membership:
    it = Membership(3, now=later)
    for worker in range(3):
        it.connect(worker, f"process {worker}", later + 1.0 + worker)
    it.wait(0, "hello")
    it.answered(0, later + 5.0)
    it.ask(1, later + 7.0, update=True)
    it.note_message(1, later + 9.0)
    it.leave(2, for_good=False, now=later + 10.0)
    return it


def test_the_first_updates_time_is_counted_from_the_answer_to_hello() -> None:
    """Worker 0 came at 1 and had to wait for the run's beginning, at 5."""
    it = members(0.0)
    assert it._conduct[0].since == 5.0 and it.members[0].turn == 5.0 and it._conduct[1].since == 2.0


def test_a_worker_may_take_several_times_the_longer_of_its_longest_and_its_present_work() -> None:
    """Worker 1 asked at 7, five seconds after it had come; the timeout is 60."""
    it = members(0.0)
    assert [it.hangs(1, 7.0 + after) for after in (59.0, 61.0)] == [False, True]
    assert [it.hangs(1, 7.0 + after, work=100.0) for after in (399.0, 401.0)] == [False, True]
    assert [it.hangs(1, 50.0 + after, since=50.0) for after in (59.0, 61.0)] == [False, True], "from the run's end"
    it.ask(1, 57.0)
    assert [it.hangs(1, 57.0 + after, work=1.0) for after in (199.0, 201.0)] == [False, True]
    it.ask(1, 58.0)  # after a second
    assert [it.hangs(1, 58.0 + after, work=1.0) for after in (199.0, 201.0)] == [False, True]


def test_the_work_of_a_worker_that_has_sent_no_update_may_take_several_times_the_longest_of_any_other() -> None:
    """Also where no first update is waited for any more, as at the end."""
    it = members(0.0)
    it.ask(1, 107.0, update=True)  # after 100 seconds
    it.connect(2, "another process", 110.0)
    assert [it.hangs(2, 110.0 + after, first_update_timeout=0.0) for after in (399.0, 401.0)] == [False, True]


def test_a_worker_that_is_not_ready_has_the_time_of_one_that_has_not_come() -> None:
    it = Membership(2, now=0.0, timeout=60.0, arrival_timeout=600.0)
    for worker, ready in ((0, True), (1, False)):
        it.connect(worker, f"process {worker}", 10.0, ready=ready)
    assert [it.silent(10.0 + after) for after in (59.0, 61.0, 599.0, 601.0)] == [set(), {0}, {0}, {0, 1}]


def test_a_worker_has_its_whole_time_from_an_answer_however_long_it_has_waited_for_that() -> None:
    it = Membership(2, now=0.0, timeout=60.0)
    it.connect(1, "x", 0.0)
    it.wait(1, "push")
    assert it.silent(500.0) == set()
    it.answered(1, 500.0)
    assert [it.silent(500.0 + after) for after in (59.0, 61.0)] == [set(), {1}]
    assert [it.hangs(1, 500.0 + after, first_update_timeout=0.0) for after in (59.0, 61.0)] == [False, True]


def test_a_first_update_is_waited_for_as_long_as_any_other_message_where_that_is_longer() -> None:
    it = Membership(2, now=0.0, timeout=60.0, arrival_timeout=10.0)
    it.connect(1, "shows life", 0.0)
    it.note_message(1, 50.0)
    assert [1 in it.awaited(now) for now in (11.0, 60.0, 61.0)] == [True, True, False]


def test_a_worker_that_comes_back_has_not_left() -> None:
    it = members(0.0)
    it.leave(1, for_good=True, now=20.0)
    assert it.is_away(2) and it.left_for_good == [1]
    it.connect(1, "another process", 21.0)
    it.connect(2, "process 2", 22.0)
    assert not it.is_away(2) and it.left_for_good == []


@pytest.mark.parametrize("comes_anew", [False, True])
def test_a_second_process_of_a_worker_has_sent_no_update_though_the_first_one_had(comes_anew: bool) -> None:
    """The first one was known to the server before this one, whose restart it outlived."""
    it = Membership(2, now=0.0, timeout=1.0, arrival_timeout=2.0)
    it.expect_back([1])
    it.connect(1, "the first", 0.5)
    if comes_anew:
        it.connect(1, "the second", 0.6)
    it.note_message(1, 4.0)
    assert (1 in it.awaited(4.0)) is not comes_anew


def test_whoever_the_server_before_knew_has_the_time_of_one_that_is_gone_to_come_and_others_that_of_a_first_one() -> (
    None
):
    it = Membership(3, now=0.0, timeout=1.0, arrival_timeout=10.0)
    it.expect_back([1])
    assert [it.expected(now) for now in (1.0, 1.1, 10.1)] == [{0, 1, 2}, {0, 2}, set()]


def test_the_time_in_which_a_worker_makes_its_model_is_not_its_longest() -> None:
    it = Membership(2, now=0.0, timeout=1.0)
    it.connect(1, "x", 0.0, ready=False)
    it.ask(1, 500.0)
    it.make_ready(1)
    it.ask(1, 501.0, update=True)
    it.connect(2, "has sent no update", 0.0)
    it.ask(2, 900.0)
    assert it._longest == 1.0


def test_after_an_excuse_all_times_are_later_and_nothing_else_has_changed() -> None:
    it = members(0.0)
    it.excuse(100.0)
    assert vars(it) == vars(members(100.0))
