"""A worker's first connection to a server that is busy: it may write the state of a large model for minutes."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from fairseq_async.errors import (
    LOST_SERVER,
    USER_ERROR,
    AsyncError,
    ExchangeError,
    ProtocolError,
    RefusedError,
    exit_code,
)
from fairseq_async.exchange import Channel, SharedMemory
from fairseq_async.options.addresses import free_port
from fairseq_async.protocol import Greeting, encode
from fairseq_async.protocol import client_connection as connection
from fairseq_async.protocol.answers import Introduced
from fairseq_async.worker.connection import lasting_connection
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.server_client import join, join_patiently, push
from tests.helpers.stand_ins import Time
from tests.helpers.waiting import wait_until


def test_a_server_that_says_nothing_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE", 0.2)
    with ThreadServer(1, tmp_path) as server:
        busy, tick = threading.Event(), server.service.tick

        def slow_tick() -> float:
            busy.set()
            time.sleep(0.7)
            return tick()

        monkeypatch.setattr(server.service, "tick", slow_tick)
        assert busy.wait(10)
        with caplog.at_level(logging.WARNING):
            client = Client(LastingConnection(server.address, server.token, 0))
        watched = client.connection.channel.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert watched == 1000 * server.service.membership.timeout > 0
        client.close()
        assert f"the server at {server.address} says nothing yet; still waiting" in caplog.text


def test_memory_that_is_gone_again_is_looked_for_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may die between its welcome and the moment in which the worker opens its memory."""
    with ThreadServer(1, tmp_path) as server:
        worker, attach, left = join_patiently(server, 0), SharedMemory.attach, [2]

        def attach_at_last(*given: Any) -> SharedMemory:
            left[0] -= 1
            if left[0] >= 0:
                raise ExchangeError("the server's shared memory cannot be opened")
            return attach(*given)

        monkeypatch.setattr(SharedMemory, "attach", attach_at_last)
        worker.connection.channel.connection.shutdown(socket.SHUT_RDWR)
        assert push(worker, 0, 0.5).version == 1 and left == [-1]
        worker.close()


@pytest.mark.parametrize("after", ["nothing", "connection", "greeting", "introduction"])
def test_a_worker_that_starts_while_the_server_dies_waits_for_the_next_server(tmp_path: Path, after: str) -> None:
    """The dying server's listening socket is closed before the next one listens."""
    port = free_port()
    connected = threading.Event()

    def die() -> None:
        if after != "nothing":
            with socket.create_server(("127.0.0.1", port)) as dying:
                connected.set()
                channel = Channel(dying.accept()[0])
                if after != "connection":
                    channel.send(encode(Greeting("0" * 32)))
                if after == "introduction":
                    channel.receive()
                channel.close()
        connected.set()
        time.sleep(0.3)
        started.append(ThreadServer(1, tmp_path, token="0" * 32, port=port))

    started: list[ThreadServer] = []
    thread = threading.Thread(target=die)
    thread.start()
    assert connected.wait(10)
    client = Client(LastingConnection(f"127.0.0.1:{port}", "0" * 32, 0, patience=30.0))
    thread.join(10)
    client.close()
    started[0].stop()


def test_nobody_waits_for_a_server_that_will_not_come_or_that_is_none_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ProtocolError) as error:
            Client(LastingConnection(address, "token", 0, patience=1e6))
        thread.join(10)
    assert exit_code(error.value) == USER_ERROR
    with pytest.raises(ExchangeError, match="no server at") as lost:
        Client(LastingConnection(address, "token", 0, patience=1e6, hopeless=lambda: True))
    assert exit_code(lost.value) == LOST_SERVER


def test_a_server_that_never_says_anything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine takes connections, and no program of it answers."""
    monkeypatch.setattr(connection, "_SILENCE", 0.1)
    monkeypatch.setattr(connection, "_GREETING_SECONDS", 0.3)
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ExchangeError, match=f"the server at {address} says nothing"):
            Client(LastingConnection(address, "token", 0))


def test_an_introduction_is_answered_late_by_a_server_in_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            channel = Channel(listener.accept()[0])
            channel.send(encode(Greeting("theirs")))
            channel.receive()
            time.sleep(0.3)
            channel.send(encode(Introduced("no proof", 0, 1, "server", 60.0)))
            channel.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(RefusedError, match="does not know this run's token"):
            connection.Connection(connection.Endpoint(address, "token", False, "one", patience=30.0), 0)
        thread.join(10)


def test_a_server_that_stays_away_is_lost_after_the_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost, of_all = list[AsyncError](), list[tuple[LastingConnection, bool]]()

    def show_life(self: LastingConnection, again: bool) -> None:
        of_all.append((self, again))
        raise ExchangeError("away")

    monkeypatch.setattr(lasting_connection, "_PAUSE", 0.01)
    monkeypatch.setattr(lasting_connection, "_SIGNS_OF_LIFE", 1e6)
    monkeypatch.setattr(LastingConnection, "show_life", show_life)
    with ThreadServer(1, tmp_path) as server:
        client = Client(LastingConnection(server.address, server.token, 0, 0.1, lost.append))
        wait_until(lambda: bool(lost))
        client.close()
    assert [str(each) for each in lost] == [client.connection.loss] and "is gone" in client.connection.loss
    # a client that an earlier test has left may try, too
    attempts = [again for connection, again in of_all if connection is client.connection]
    assert attempts[0] is False and all(attempts[1:]) and len(attempts) > 2


def test_signs_of_life_are_four_within_the_time_and_attempts_to_connect_at_most_five_seconds_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, waited, pauses = threading.Event(), list[float](), list[float]()

    def wait_once(seconds: float) -> None:
        waited.append(seconds)
        left.set()

    worker: Any = SimpleNamespace(left=left, channel=SimpleNamespace(timeout=60.0, is_closed=wait_once))
    LastingConnection._stay_alive(worker, print)
    faked = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr("fairseq_async.worker.connection.lasting_connection.time", faked)

    def meet() -> str:
        if len(pauses) < 9:
            raise ExchangeError("not there yet")
        return "there"

    patient: Any = SimpleNamespace(patience=1e6, _hopeless=lambda: False)
    assert LastingConnection._try_again(patient, meet) == "there"  # type: ignore[type-var]
    assert waited == [15.0] and pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_a_server_that_stays_away_is_tried_until_the_very_end_of_the_patience(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time, worker = Time(), MagicMock(patience=12.0)
    monkeypatch.setattr(lasting_connection, "time", time)
    worker._hopeless.return_value = False
    meet = MagicMock(side_effect=ExchangeError("not there yet"))
    with pytest.raises(ExchangeError, match="not there yet"):
        LastingConnection._try_again(worker, meet)
    assert time.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.7]) and meet.call_count == 9
    assert caplog.messages == ["not there yet; trying again for 12 s"], "once"
    caplog.clear()
    meet.side_effect = [*[ExchangeError("not there yet")] * 4, "there"]
    assert LastingConnection._try_again(worker, meet) == "there" and not caplog.messages, "it was away for a moment"


@pytest.mark.parametrize("initialised", [False, True])
@pytest.mark.parametrize("shards_are_there", [False, True])
def test_a_server_is_back_when_its_shards_on_other_machines_are_if_its_run_has_begun(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, shards_are_there: bool
) -> None:
    """Else the next request would fail, and be sent again, without a pause."""
    there = MagicMock(server="another process")
    monkeypatch.setattr(lasting_connection, "Connection", lambda endpoint, worker: there)
    worker: Any = MagicMock(initialised=False, restored_version=None, _server="the one before")
    worker.greet.return_value = SimpleNamespace(initialised=initialised, version=3)
    worker.lines.connect.side_effect = None if shards_are_there else ExchangeError("no shard")
    lacks = initialised and not shards_are_there
    with pytest.raises(ExchangeError, match="no shard") if lacks else nullcontext():
        LastingConnection._connect_again(worker)
    assert worker.lines.connect.called == initialised and worker.channel is there
    assert (worker._server, worker.restored_version) == (
        ("the one before", None) if lacks else ("another process", 3)
    ), "the next attempt is to find the other process too"


@pytest.mark.parametrize("back_after", [11.0, 14.0])
def test_a_server_is_lost_to_a_worker_that_computes_when_all_attempts_of_its_patience_have_failed(
    monkeypatch: pytest.MonkeyPatch, back_after: float
) -> None:
    """Away for 11 seconds and, later, again: each time the patience, of 12, counts anew."""
    time, lost, times = Time(0.0), list[float](), list[float]()
    monkeypatch.setattr(lasting_connection, "time", time)
    worker: Any = MagicMock(patience=12.0, channel=SimpleNamespace(timeout=60.0, is_closed=time.sleep))
    worker.left.is_set.side_effect = lambda: bool(lost) or time.now > 100.0
    worker.left.wait.side_effect = lambda seconds: time.sleep(seconds)

    def show_life(again: bool) -> None:
        times.append(time.now)
        if min(abs(time.now - begins - back_after / 2) for begins in (15.0, 45.0)) < back_after / 2:
            raise ExchangeError("away")

    worker.show_life = show_life
    LastingConnection._stay_alive(worker, lambda error: lost.append(time.now))
    assert lost == ([] if back_after < 12 else [15.5 + 12.5])
    assert times[:3] == [15.5, 16.0, 16.5], (
        "when a sign of life is due, after a fourth of the timeout; then twice a second"
    )


@pytest.mark.parametrize("end", [Client.close, lambda client: client.leave(finished=False)], ids=["closed", "left"])
def test_a_connection_that_was_ended_is_not_made_again(end: Callable[[Client], None], tmp_path: Path) -> None:
    """As for another thread's request: rounds would wait for this worker."""
    with ThreadServer(1, tmp_path) as server:
        client = join_patiently(server, 0)
        end(client)
        with pytest.raises(ExchangeError):
            client.schedule_event("begin_epoch", 1, None)
        wait_until(lambda: not server.service.peers)
        assert client.connection.channel.connection.fileno() == -1


def test_a_worker_that_leaves_waits_a_while_for_a_server_that_does_not_answer_and_for_its_own_thread() -> None:
    worker: Any = MagicMock()
    worker.left.is_set.return_value = worker.channel.is_readable.return_value = False
    LastingConnection.leave(worker, finished=False)
    worker.channel.is_readable.assert_called_once_with(10.0)
    worker.channel.receive.assert_not_called()
    worker._close_connections.assert_called_once_with()
    LastingConnection._end(worker)
    worker._showing_life.join.assert_called_once_with(2.0)


@pytest.mark.parametrize(
    ("seconds", "silent", "asked", "rest"),
    [
        (300.0, 130.0, [60.0, 60.0, 60.0], 170.0),  # a minute of silence is told
        (300.0, 1000.0, [60.0] * 5, 10.0),
        (5.0, 1000.0, [5.0], 5.0),
        (5.0, 2.0, [5.0], 5.0),
    ],
)
def test_the_first_message_is_waited_for_as_long_as_was_asked_and_a_line_comes_each_minute(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    silent: float,
    asked: list[float],
    rest: float,
) -> None:
    """The rest of the time is for the whole of the message: ten seconds where that is more, and was asked for."""
    time, waits, timeouts = Time(0.0), list[float](), list[float]()
    monkeypatch.setattr(connection, "time", time)

    def is_readable(seconds: float) -> bool:
        waits.append(seconds)
        time.sleep(min(seconds, max(0.0, silent - time.now)))
        return time.now >= silent

    faked: Any = SimpleNamespace(
        is_readable=is_readable,
        connection=SimpleNamespace(settimeout=timeouts.append),
        receive=lambda: encode(Greeting("theirs")),
    )
    assert connection.Connection._greeting(faked, "there:1", seconds).challenge == "theirs"
    assert waits == asked and timeouts == [rest]
    assert caplog.messages == ["the server at there:1 says nothing yet; still waiting"] * (len(asked) - 1)


def test_how_long_a_worker_waits_at_each_step_of_its_introduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has ten seconds, and the server five minutes to say something, where it was not told otherwise."""
    (ours, theirs), waits = socket.socketpair(), list[Any]()
    connect = MagicMock(return_value=ours)
    monkeypatch.setattr(socket, "create_connection", connect)

    def introduce(self: connection.Connection, endpoint: object, worker: object, patience: float) -> None:
        waits.append((patience, self.connection.gettimeout()))

    monkeypatch.setattr(connection.Connection, "_introduce", introduce)
    for patience in (None, 7.0):
        connection.Connection(connection.Endpoint("there:1", "token", False, "one", patience=patience), 0)
    assert connect.call_args_list == [call(("there", 1), timeout=10.0)] * 2
    assert waits == [(300.0, 300.0), (7.0, 7.0)]
    ours.close()
    theirs.close()


def test_an_answer_that_is_missing_for_minutes_is_told_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    monkeypatch.setattr(connection, "time", time)

    def is_readable(seconds: float) -> bool:
        time.sleep(seconds)
        return len(time.pauses) > 2

    faked: Any = SimpleNamespace(is_readable=is_readable, receive=lambda: encode(Greeting("theirs")))
    assert connection.Connection.answer(faked, Greeting).challenge == "theirs"
    assert caplog.messages == [f"no answer from the server since {n} s; still waiting" for n in (60, 120)]


def test_a_worker_shows_life_as_often_as_its_run_asks_for(tmp_path: Path) -> None:
    """The server does not know the run's timeout before the first worker has joined."""
    with ThreadServer(1, tmp_path) as server:
        client = join(server, 0, worker_timeout=3.0)
        assert client.connection.channel.timeout == 3.0
        assert client.connection.channel.connection.gettimeout() is None, "a message may come with pauses"
        client.leave(finished=True)
