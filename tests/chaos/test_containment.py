"""One worker that hangs, one report, one directory must not cost the others their run."""

import math
import os
import shutil
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.protocol import (
    Alive,
    Assignment,
    Greeting,
    Initialise,
    Introduce,
    Introduced,
    Layout,
    Leave,
    Pull,
    PullReply,
    Push,
    Report,
    Status,
    encode,
    parse_answer,
)
from fairseq_async.records.state_files import restored_path
from fairseq_async.reporting import page
from fairseq_async.reporting.runs import load
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.run import Run
from fairseq_async.server.service import Service
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from tests.helpers import halving, in_process
from tests.helpers.commands import Processes, launch_command
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, new_service
from tests.helpers.launched import count, worker_of
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.run_files import events
from tests.helpers.server_client import SGD_SERVER, StartServer, StartThreadServer, join, push
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
        hangs.left.set()  # its signs of life end
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


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return new_service(2, tmp_path / "run", halving.build, lambda: 1000.0)


def test_a_clock_that_fails_ends_nothing(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake in what time brings is a line in the log, as one in what a message brings is."""
    service.run_dir.mkdir()
    connection = begun(service)

    def fail(now: float) -> Any:
        raise ZeroDivisionError("a mistake")

    assert service.run is not None
    monkeypatch.setattr(service.run.coordinator, "tick", fail)
    assert [service.tick() for _ in range(3)] == [1.0] * 3 and service.refusals.counts["internal error"] == 3
    monkeypatch.undo()
    in_process.slot(service, 0).fill_(1.0)
    assert connection.send(Push(0, 0, 1.0, Report())) and connection.last["status"] == "applied"


def begun(service: Service, **changes: Any) -> Connection:
    connection = Connection(service)
    connection.introduce(0)
    hello(connection, layout(), **changes)
    in_process.slot(service, 0).zero_()
    connection.send({"kind": "initialise", "restored": False})
    return connection


def layout() -> dict[str, Any]:
    rows = [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in LAYOUT.segments]
    return {"segments": rows}


@pytest.mark.parametrize("trouble", ["no process", "no directory"])
def test_a_run_goes_on_without_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    def no_process() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    service = Service(in_process.TOKEN, 2, run_dir, halving.build, lambda: 1000.0)
    monkeypatch.setattr(os, "fork", no_process)
    connection = begun(service)
    if trouble == "no directory":
        shutil.rmtree(run_dir)
    in_process.slot(service, 0).fill_(1.0)
    assert connection.send(Push(0, 0, 1.0, Report())) and connection.last["status"] == "applied"
    service.snapshots._taken_at = None
    assert service.tick() == 1.0
    assert "a snapshot could not be written: " in capfd.readouterr().err
    connection.send(Alive())
    in_process.end(service)


def test_a_flood_of_mistakes_fills_no_log(service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(100):
        service.refusals.count_mistake("worker 1", ValueError("line\nfeed \x1b[31m"))
    service.refusals.count("messages", "worker \x1b", "a\nb")
    said = capfd.readouterr().err
    assert said.count("refused (internal error") == 7 and len(said) < 10_000
    assert "\x1b" not in said and r"worker \x1b: a\nb" in said


def test_the_launcher_ends_a_run_without_a_worker_that_hangs(processes: Processes, data: Path, tmp_path: Path) -> None:
    flags = ["--max-update", 200, "--disable-validation", "--worker-timeout", 3]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags))
    wait_until(lambda: count(tmp_path, 1) > 5, 90)
    stop(worker_of(tmp_path, 1))
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, output
    assert "worker 1 was not heard of for 3 s" in output and "worker 1 did not end with the run" in output
    assert (tmp_path / "checkpoint_last.pt").exists()


# What one worker says binds nobody else


def with_shape(*shape: int) -> dict[str, Any]:
    return {"segments": [{"name": "w", "shape": list(shape), "dtype": "float32"}]}


def hello(connection: Connection, described: dict[str, Any], remote: bool = False, **changes: Any) -> bool:
    message = {"kind": "hello", "spec": halving_spec(**changes).to_json(), "layout": described, "remote": remote}
    return connection.send(message)


def test_only_worker_0_describes_the_run(service: Service, tmp_path: Path) -> None:
    """A joiner with another model that comes first is refused when worker 0 is there, and not the other way round."""
    service.run_dir.mkdir()
    other, gone = Connection(service), Connection(service)
    other.introduce(1)
    assert not hello(other, with_shape(7))
    gone.introduce(1, instance="x")
    gone.close()
    again = Connection(service)
    again.introduce(1)
    assert not hello(again, with_shape(7))
    first = begun(service)
    assert first.last["kind"] == "welcome" and "its w is 7 float32, theirs is " in again.last["error"]
    assert hello(again, layout()) and again.last["kind"] == "welcome"


@pytest.mark.parametrize("shape", [(-1,), (1 << 40, 1 << 40), (0,), (-2, -3)])
def test_tensors_that_cannot_be_are_refused(service: Service, shape: tuple[int, ...]) -> None:
    first = Connection(service)
    first.introduce(0)
    assert hello(first, with_shape(*shape)) and first.last["error"].startswith("malformed message: layout: segments")
    assert service.run is None


POSITIONS = ["9" * 700, "[" * 100 + "]" * 100, '"' + "x" * 40_000 + '"']


@pytest.mark.parametrize("position", POSITIONS, ids=["digits", "depth", "size"])
def test_a_position_that_could_not_be_read_back_is_refused(service: Service, position: str) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    body = encode(Push(0, 0, 1.0, Report(position={"at": "HERE"}))).replace(b'"HERE"', position.encode())
    service.receive(first.peer, body)
    assert "malformed message" in first.last["error"] and "position" in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report(position={"at": 1}))) and first.last["status"] == "applied"
    in_process.take_snapshot(service)
    assert service.snapshots.latest(lambda state: None) is not None


@pytest.mark.parametrize("count", ["local_steps", "shard", "offset", "bytes_sent", "bytes_received"])
def test_a_count_that_no_reader_could_add_up_is_refused(service: Service, count: str) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for wrong in (int("9" * 4000), (1 << 53) + 1, -1):
        body = encode(Push(0, 0, 1.0, Report())).replace(f'"{count}":null'.encode(), f'"{count}":{wrong}'.encode())
        service.receive(first.peer, body)
        assert "malformed message" in first.last["error"] and count in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report(**{count: 1 << 53}))) and first.last["status"] == "applied"


def test_an_update_that_comes_again_and_again_leaves_no_position_in_the_log(service: Service) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for _ in range(3):
        first.send(Push(0, 0, 1.0, Report(position={"at": "x" * 30_000})))
    assert ["position" in event for event in events(service.run_dir)] == [True, False, False]
    assert (service.run_dir / "events.jsonl").stat().st_size < 32_000


def test_a_report_that_no_fp32_can_hold_leaves_a_log_that_can_be_drawn(service: Service, tmp_path: Path) -> None:
    service.run_dir.mkdir()
    first = begun(service, updates_per_step=1)
    for number, value in enumerate((1.0, 1e308, -1e308, 3e38, 2.0)):
        in_process.slot(service, 0).fill_(1.0)
        size = abs(value)
        seconds = {"computing_seconds": size, "waiting_seconds": size, "push_seconds": size}
        report = Report(
            loss=value, progress=value, epochs=0.1, tokens=min(size, 2.0**53), residual_norm=size, **seconds
        )
        assert first.send(Push(number, number, 1.0, report)) and first.last["status"] == "applied"
    logged = events(service.run_dir)
    assert [event["loss"] for event in logged] == [1.0, None, None, 3e38, 2.0]
    assert page.write(load([service.run_dir]), "title", tmp_path / "report").exists()


def test_numbers_of_updates_grow_by_one(service: Service) -> None:
    service.run_dir.mkdir()
    first = begun(service)
    in_process.slot(service, 0).fill_(1.0)
    for number in ((1 << 63) - 1, 1):
        assert first.send(Push(number, 0, 1.0, Report()))
        assert f"sequence number {number}: the next of worker 0 is 0" in first.last["error"]
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "applied"


@pytest.mark.parametrize("seconds", [1e-320, 5e-324, 1e-9, 1e-5])
def test_a_claim_to_be_fast_takes_no_more_than_a_part_of_the_others_steps(seconds: float) -> None:
    plan = LocalStepPlan(workers=3, local_steps=64, total_steps=1000, dynamic_local_steps=True, shards=[], seed=1)
    for _ in range(3):
        for worker, claimed in enumerate((seconds, 0.1, 0.1)):
            plan.assign(worker)
            plan.record(worker, Report(local_steps=10, step_seconds=claimed))
    assert all(math.isfinite(speed) for speed in plan.speeds.values())
    assert [plan.assign(worker).local_steps for worker in (1, 2)] in ([4, 4], [64, 64])


def test_of_two_workers_the_claim_of_one_leaves_the_other_a_step() -> None:
    """As docs/faults.md says: the median of two speeds is no measure."""
    plan = LocalStepPlan(workers=2, local_steps=64, total_steps=1000, dynamic_local_steps=True, shards=[], seed=1)
    for worker, claimed in enumerate((1e-5, 0.1)):
        plan.assign(worker)
        plan.record(worker, Report(local_steps=10, step_seconds=claimed))
    assert plan.assign(1).local_steps == 1


@pytest.mark.parametrize("claim", [{"local_steps": 10**6}, {"local_steps": 1, "epochs": 1e9}])
def test_a_report_that_cannot_be_is_refused_and_does_not_end_the_run(claim: dict[str, Any]) -> None:
    plan = LocalStepPlan(
        workers=2, local_steps=20, total_steps=1000, dynamic_local_steps=False, shards=[], seed=1, max_epoch=10
    )
    with pytest.raises(RefusedError):
        plan.check(Report(**{"step_seconds": 0.1} | claim))
    assert not plan.finished


def test_a_socket_that_another_thread_has_read_holds_nobody_up() -> None:
    here, there = _connection()
    with here, there:
        assert Channel(here).messages() == []
        there.sendall(b"\0\0\0")  # a part of a frame
        assert Channel(here).messages() == []


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    return here, there


def test_who_asks_and_does_not_read_is_disconnected_and_the_others_have_their_turns(
    start_thread_server: StartThreadServer,
) -> None:
    server = start_thread_server(2)
    honest, greedy = (join(server, worker) for worker in (0, 1))
    connection = greedy._channel.connection
    body = encode(Pull())
    frames = (struct.pack("!IQ", len(body), 0) + body) * 4096
    connection.setblocking(False)
    sent, answered = 0, 0
    for number in range(20):
        with suppress(OSError):
            for _ in range(8):
                sent += connection.send(frames)
        answered += push(honest, number, 0.5, base=number).status is Status.APPLIED
    assert answered == 20 and sent > 0
    backlog = [peer.channel.unsent for peer in server._loop.peers]
    assert max(backlog) <= 64


def test_an_update_waits_for_few_of_the_messages_of_those_who_send_as_fast_as_they_can(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them, each with questions that take longer than its update; they take every answer."""
    server = start_thread_server(1)
    honest = join(server, 0, workers=1)
    clients = [join(server, None, workers=1) for _ in range(8)]
    handled: list[int] = []
    pull, ended = Service._pull, threading.Event()

    def slow(service: Service, peer: Any, question: Pull) -> None:
        handled.append(peer.id)
        ended.wait(0.06)
        pull(service, peer, question)

    def ask(client: Client) -> None:
        body = encode(Pull())
        client._channel.connection.sendall((struct.pack("!IQ", len(body), 0) + body) * 512)
        with suppress(ExchangeError):
            while not ended.is_set():
                client._channel.receive()

    monkeypatch.setattr(Service, "_pull", slow)
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, client) for client in clients]
        wait_until(lambda: len(handled) >= 40)
        before = []
        for number in range(5):
            begun_at = len(handled)
            assert push(honest, number, 0.5, base=number).status is Status.APPLIED
            before.append(len(handled) - begun_at)
        ended.set()
        for client in clients:
            client._channel.end()
        for each in asking:
            each.result(10)
    assert max(before) <= 4, before


def test_who_does_not_take_large_answers_is_not_heard_until_it_does(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters ahead are encoded for each question: the answers that wait would fill the memory."""
    server = start_thread_server(2)
    large, spec = Layout.of([("weight", torch.zeros(1_000_000))]), sgd_spec(workers=2, compress={"pull": "int8"})
    honest, greedy = (Client(server.address, server.token, worker) for worker in (0, 1))
    honest.join(large, spec)
    honest.slot.zero_()
    honest.initialise(None)
    greedy.join(large, spec)
    connection = greedy._channel.connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # far less than an answer
    server.service.peers[1].channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    handed_out: list[int] = []
    hand_out = Run.hand_out

    def counted(run: Run, worker: int, pull: Pull) -> Any:
        handed_out.append(worker)
        return hand_out(run, worker, pull)

    monkeypatch.setattr(Run, "hand_out", counted)
    for number in range(12):
        greedy._channel.send(encode(Pull(1.0 + number / 64, starts=True)))
    for number in range(3):
        assert push(honest, number, 0.5, base=number).status is Status.APPLIED
    assert handed_out.count(1) == 2 and 1 in server.service.peers
    greedy._channel.room, greedy._channel.any_length = torch.empty(4_000_000, dtype=torch.uint8), True
    for _ in range(12):
        assert parse_answer(greedy._channel.receive(), PullReply).compressed
    assert handed_out.count(1) == 12


def test_a_message_of_a_worker_is_small_once_its_model_is_known(service: Service) -> None:
    service.run_dir.mkdir()
    assert begun(service).channel.largest <= 1 << 20


def test_a_worker_sends_one_large_message_on_a_connection(service: Service) -> None:
    """The one in which it describes its model; whatever else it sends does not take the others' time again."""
    service.run_dir.mkdir()
    begun(service)
    other = Connection(service)
    other.introduce(1)
    before = other.channel.largest
    assert other.send({"kind": "alive", "x": "x" * (1 << 19)}) and "malformed message" in other.last["error"]
    assert before > 1 << 20 and other.channel.largest <= 1 << 18
    assert hello(other, layout()) and other.last["kind"] == "welcome"


def test_a_worker_that_answers_slowly_comes_in_through_a_crowd_of_strangers(
    start_thread_server: StartThreadServer,
) -> None:
    """Two hundred connections are made between its connection and its answer."""
    server = start_thread_server(2)
    host, _, port = server.address.rpartition(":")
    address = host, int(port)
    with socket.create_connection(address) as slow, ExitStack() as crowd:
        channel = Channel(slow)
        theirs, ours = parse_answer(channel.receive(), Greeting).challenge, challenge()
        for _ in range(200):
            crowd.enter_context(socket.create_connection(address))
        wait_until(lambda: len(server._loop.peers) > 200)
        own = proof(server.token, "worker", theirs, ours)
        channel.send(encode(Introduce(own, ours, 1, joins=False, instance="x")))
        assert parse_answer(channel.receive(), Introduced).worker == 1


def test_a_storm_of_one_address_costs_that_address_alone(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_async.server.network.connection_loop._HANDSHAKE_SECONDS", 1e6)  # on a busy machine
    server = start_thread_server(2)
    host, _, port = server.address.rpartition(":")
    with ExitStack() as crowd:
        own = crowd.enter_context(socket.create_connection((host, int(port))))
        for _ in range(300):
            crowd.enter_context(socket.create_connection((host, int(port)), source_address=("127.0.0.9", 0)))
        wait_until(lambda: server.service.refusals.counts["no introduction"] == 300 - 256, seconds=60)
        wait_until(lambda: len(server._loop.peers) == 257)  # and from now on it closes none of them
        assert own.getsockname() in [peer.channel.connection.getpeername() for peer in server._loop.peers]


def test_a_report_that_cannot_be_counted_spares_the_others_of_its_round(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both updates of the round are applied and answered, though the plan fails over one of them."""
    service.run_dir.mkdir()
    first = begun(service, barrier=2)
    second = Connection(service)
    second.introduce(1)
    assert service.run is not None
    plan = service.run.coordinator.plan
    record = plan.record

    def fail(worker: int, report: Report) -> None:
        if worker == 0:
            raise TypeError("a mistake")
        record(worker, report)

    monkeypatch.setattr(plan, "record", fail)
    assert hello(second, layout(), barrier=2)
    for worker, connection in enumerate((first, second)):
        in_process.slot(service, worker).fill_(1.0)
        connection.send(Push(0, 0, 1.0, Report()))
    assert [each.last.get("status") for each in (first, second)] == ["applied"] * 2
    assert service.refusals.counts["internal error"] == 1


def test_a_plan_that_has_no_work_for_one_spares_the_others_of_its_round(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.run_dir.mkdir()
    first = begun(service, barrier=2)
    second = Connection(service)
    second.introduce(1)
    assert service.run is not None and hello(second, layout(), barrier=2)
    plan = service.run.coordinator.plan
    assign = plan.assign

    def fail(worker: int) -> Assignment:
        if worker == 0:
            raise TypeError("a mistake")
        return assign(worker)

    monkeypatch.setattr(plan, "assign", fail)
    for worker, connection in enumerate((first, second)):
        in_process.slot(service, worker).fill_(1.0)
        connection.send(Push(0, 0, 1.0, Report()))
    assert "a mistake" in first.last["error"] and second.last["status"] == "applied"
    monkeypatch.setattr(plan, "assign", assign)
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "duplicate"


def test_an_answer_that_fails_spares_the_others_of_its_round(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the parameters of worker 0, and worker 1 has sent the update that completes the round."""
    service.run_dir.mkdir()
    first, second = (Connection(service) for _ in range(2))
    for worker, connection in enumerate((first, second)):
        connection.introduce(worker)
        hello(connection, layout(), remote=True, barrier=2, publishes=False)
        connection.channel.receive(bytes(4 * LAYOUT.size))
        if worker == 0:
            connection.send(Initialise(False))
    assert service.run is not None
    hand_out = service.run.hand_out

    def fail(worker: int, pull: Pull) -> Any:
        if worker == 0:
            raise MemoryError("no memory for this one")
        return hand_out(worker, pull)

    monkeypatch.setattr(service.run, "hand_out", fail)
    for connection in (first, second):
        connection.send(Push(0, 0, 1.0, Report(), pulls=True))
    assert "no memory for this one" in first.last["error"] and second.last["kind"] == "pull_reply"
    assert first.send(Push(0, 0, 1.0, Report())) and first.last["status"] == "duplicate", "it is applied, and here"


# Files


def test_a_state_is_in_files_that_the_server_names_and_nobody_else_reads(
    start_thread_server: StartThreadServer, tmp_path: Path
) -> None:
    worker = join(start_thread_server(1), 0, workers=1, record=True)
    push(worker, 0, 0.5)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".state-0.pt").symlink_to(victim)
    worker.save_state(str(tmp_path / "state.pt"))
    assert victim.read_text() == "mine" and not (tmp_path / ".state-0.pt").exists()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("state.pt", "start.pt")] == [0o600] * 2


def test_only_worker_0_takes_the_runs_state(service: Service) -> None:
    service.run_dir.mkdir()
    begun(service)
    second = Connection(service)
    second.introduce(1)
    hello(second, layout())
    assert second.send({"kind": "save_state"}) and second.last["error"] == "worker 0 saves the run's state"
    assert not list(service.run_dir.glob(".state*"))


def test_a_snapshot_is_its_owners_alone(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    assert [path.stat().st_mode & 0o777 for path in snapshots.directory.iterdir()] == [0o600]


@pytest.mark.parametrize("there", ["pipe", "link", "directory", "nothing"])
def test_what_is_no_file_of_a_state_is_refused_at_once(service: Service, tmp_path: Path, there: str) -> None:
    service.run_dir.mkdir()
    path = restored_path(service.run_dir)
    if there == "pipe":
        os.mkfifo(path)
    elif there == "link":
        path.symlink_to("/etc/hostname")
    elif there == "directory":
        path.mkdir()
    first = Connection(service)
    first.introduce(0)
    hello(first, layout())
    assert first.send(Initialise(True)) and "the server's state cannot be read" in first.last["error"]
    assert first.send(Initialise(False)) and first.last["kind"] == "welcome"


def test_a_snapshot_that_cannot_be_read_back_replaces_nothing(tmp_path: Path) -> None:
    snapshots = InlineSnapshots(tmp_path)
    snapshots.take({"version": 1}, 1)
    with suppress(Exception):
        snapshots.take({"version": 2, "position": Path("no plain data")}, 2)
    assert [path.name for path in snapshots.directory.iterdir()] == ["version-000000000001.pt"]
