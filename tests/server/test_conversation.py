"""What a server answers to its workers, over loopback and with a rule that needs no fairseq."""

import json
import select
import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async import errors
from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.protocol import (
    ErrorReply,
    Goodbye,
    Greeting,
    Hello,
    Layout,
    Pull,
    Push,
    PushReply,
    Segment,
    Status,
    Welcome,
    encode,
    parse_answer,
)
from fairseq_async.server.network import connection_loop
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.slots import Slots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.connection.server_connection import JoinDetails
from scripts.faults.sgd_server import build, sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers import in_process
from tests.helpers.run_files import events
from tests.helpers.server_client import LAYOUT, METHOD, ask, changed, join, pull, push
from tests.helpers.waiting import wait_until

HELLO = Hello(METHOD, LAYOUT, remote=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    with ThreadServer(2, tmp_path) as server:
        yield server


def test_two_workers_share_the_parameters_that_worker_0_brought(server: ThreadServer, tmp_path: Path) -> None:
    first = join(server, 0)
    second = join(server, 1)
    assert pull(second) == (0, 1.0)
    assert push(first, 0, 0.5).version == 1
    assert push(second, 0, 0.25).staleness == 1
    assert pull(first) == pull(second) == (2, 0.25)
    updates = events(tmp_path)
    assert [(e["worker"], e["sequence"], e["base_version"], e["version_after"]) for e in updates] == [
        (0, 0, 0, 1),
        (1, 0, 0, 2),
    ]
    assert all(e["norm"] > 0 and e["weight"] == 1.0 and e["time"] > 0 for e in updates)


def test_a_worker_that_died_in_the_middle_of_a_write_costs_that_update_and_comes_back(server: ThreadServer) -> None:
    first, second = join(server, 0), join(server, 1)
    push(second, 0, 0.5)
    second.slot.fill_(1e9)  # written, never pushed
    second.connection.channel.close()
    assert push(first, 0, 0.25).version == 2 and pull(first) == (2, 0.25)
    again = Client(LastingConnection(server.address, server.token, 1))
    welcome = again.join(LAYOUT, METHOD)
    assert welcome.sequence == 1 and welcome.position == {"epoch": 1, "seen": 0}


def test_a_worker_that_is_started_again_may_have_the_buffers_of_a_later_checkpoint(server: ThreadServer) -> None:
    """As a model's whose buffers move with the training, and which its script loads. At its first start it may not."""
    joined = [Client(LastingConnection(server.address, server.token, worker)) for worker in (0, 1)]
    joined[0].join(LAYOUT, METHOD, JoinDetails(buffers="at the start", unsaved={"cache": [1.0]}))
    joined[0].initialise(None)
    with pytest.raises(RefusedError, match="worker 1 has other values than the others in buffers that the model saves"):
        joined[1].join(LAYOUT, METHOD, JoinDetails(buffers="later"))
    with pytest.raises(RefusedError, match="other values than the others in the buffer cache, which the model does"):
        joined[1].join(LAYOUT, METHOD, JoinDetails(unsaved={"cache": [2.0]}))
    for buffers, value in (("at the start", 1.0), ("later", 2.0)):
        joined[1].connection.channel.close()
        joined[1] = Client(LastingConnection(server.address, server.token, 1))
        details = JoinDetails(buffers=buffers, unsaved={"cache": [value]})
        assert joined[1].join(LAYOUT, METHOD, details).initialised


def test_the_whole_state_comes_back_from_a_snapshot(server: ThreadServer, tmp_path: Path) -> None:
    first = join(server, 0, updates_per_step=2)
    for sequence in range(3):
        push(first, sequence, 0.5)
    first.save_state(str(tmp_path / "state.pt"))
    with ThreadServer(2, tmp_path / "other") as other:
        client = Client(LastingConnection(other.address, other.token, 0))
        client.join(LAYOUT, sgd_spec(updates_per_step=2))
        welcome = client.initialise(str(tmp_path / "state.pt"))
        assert welcome.sequence == 3 and pull(client) == pull(first)
        assert push(client, 3, 0.5).version == push(first, 3, 0.5).version == 2  # the third waited in the sum
        assert pull(client) == pull(first)


def taken_up(server: ThreadServer, tmp_path: Path, before: str, now: str) -> Welcome:
    """A run of one pass, which has ended with the one inner optimizer and is taken up with the other."""
    first = join(server, 0, max_epoch=1, framework={"inner_optimizer": {"_name": before}})
    assert push(first, 0, 0.5, epochs=1.0).finished
    first.save_state(str(tmp_path / "state.pt"))
    with ThreadServer(2, tmp_path / "other") as other:
        client = Client(LastingConnection(other.address, other.token, 0))
        client.join(LAYOUT, sgd_spec(max_epoch=1, framework={"inner_optimizer": {"_name": now}}))
        return client.initialise(str(tmp_path / "state.pt"))


def test_a_run_that_had_passed_its_data_is_finished_when_it_is_taken_up(server: ThreadServer, tmp_path: Path) -> None:
    assert taken_up(server, tmp_path, "adam", "adam").finished


def test_the_state_of_another_inner_optimizer_is_refused(server: ThreadServer, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="inner optimizer is adam, this run's is nag: give --inner-optimizer adam"):
        taken_up(server, tmp_path, "adam", "nag")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            encode(Hello(METHOD, Layout((Segment("weight", (2, 3), "float32"),)), remote=False)),
            "another model than the others: its weight is 2x3 float32, theirs is 2x2 float32",
        ),
        (
            encode(Hello(METHOD, Layout((*LAYOUT.segments, Segment("scale", (2,), "float32"))), remote=False)),
            "another model than the others: theirs lacks scale 2 float32",
        ),
        (
            encode(Hello(METHOD, Layout((Segment("w", (2, 2), "float32"),)), remote=False)),
            "another model than the others: theirs lacks w 2x2 float32",
        ),
        (
            encode(Hello(METHOD, Layout((*LAYOUT.segments, LAYOUT.segments[0])), remote=False)),
            "another model than the others: a name is there twice",
        ),
        (
            encode(Hello(sgd_spec(updates_per_step=3), LAYOUT, remote=False)),
            "another --updates-per-step than the others",
        ),
        (encode(Push(0, 0, 1.0)), "say hello first"),
        (changed(HELLO, {"kind": "dance"}), "malformed message: Input tag 'dance'"),
        (changed(HELLO, {"layout": "nonsense"}), "malformed message: layout: "),
        (changed(HELLO, {"spec": None}), "malformed message: spec: "),
        (b"[]", "malformed message: "),
    ],
)
def test_who_does_not_fit_is_told_why_and_the_server_stays(server: ThreadServer, body: bytes, message: str) -> None:
    first = join(server, 0)
    assert message in ask(Client(LastingConnection(server.address, server.token, 1)), body)["error"]
    assert push(first, 0, 0.5).version == 1


@pytest.mark.parametrize(
    ("token", "worker", "message"),
    [("wrong", 1, "another run"), (None, 2, "there is no worker 2"), (None, 0, "worker 0 is here already")],
)
def test_strangers_do_not_come_in(server: ThreadServer, token: str | None, worker: int, message: str) -> None:
    first = join(server, 0)
    with pytest.raises(RefusedError, match=message):
        Client(LastingConnection(server.address, token or server.token, worker))
    assert push(first, 0, 0.5).version == 1


def header(body: int, tensor: int = 0) -> bytes:
    """What is before a message: how many bytes it and the tensor behind it have."""
    return struct.pack("!IQ", body, tensor)


def test_bytes_that_are_no_message_close_that_connection_only(server: ThreadServer) -> None:
    first = join(server, 0)
    host, port = server.address.split(":")
    for garbage in (header(2**31), header(4) + b"\xff\xfe{}", header(2, tensor=24) + b"{}", header(2) + b"[}"):
        with socket.create_connection((host, int(port))) as stranger:
            parse_answer(Channel(stranger).receive(), Greeting)
            stranger.sendall(garbage)
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    assert push(first, 0, 0.5).version == 1


def test_the_barrier_answers_both_workers_when_the_round_is_complete(server: ThreadServer) -> None:
    method = {"updates_per_step": 2, "barrier": 2}
    first, second = join(server, 0, **method), join(server, 1, **method)
    first.slot.fill_(1.0)
    first.connection.channel.send(encode(Push(0, 0, 1.0)))
    assert pull(second) == (0, 1.0)
    assert push(second, 0, 0.0).version == 1
    assert parse_answer(first.connection.channel.receive(), PushReply).version == 1
    assert pull(first) == (1, 0.5)


def test_a_worker_that_is_refused_does_not_hold_up_the_others(server: ThreadServer) -> None:
    """Its process may never end. The next process of the worker is waited for."""
    method = {"updates_per_step": 2, "barrier": 2}
    first, refused = join(server, 0, **method), Client(LastingConnection(server.address, server.token, 1))
    first.connection.channel.send(encode(Push(0, 0, 1.0)))
    other = Layout.of([("weight", torch.zeros(3, 3))])
    with pytest.raises(RefusedError, match="worker 1 has another model than the others"):
        refused.join(other, sgd_spec(**method))
    assert parse_answer(first.connection.channel.receive(), PushReply).version == 1
    refused.connection.channel.close()
    again = join(server, 1, **method)
    first.connection.channel.send(encode(Push(1, 1, 1.0)))
    assert push(again, 0, 0.5, base=1).version == 2
    assert parse_answer(first.connection.channel.receive(), PushReply).version == 2


def test_a_worker_that_leaves_a_barrier_run_early_does_not_hold_up_the_others(server: ThreadServer) -> None:
    method = {"updates_per_step": 2, "barrier": 2}
    first, second = join(server, 0, **method), join(server, 1, **method)
    first.connection.channel.send(encode(Push(0, 0, 1.0)))
    second.leave(finished=False)
    assert parse_answer(first.connection.channel.receive(), PushReply).status is Status.APPLIED


def test_parameters_of_a_server_that_died_meanwhile_are_not_taken_for_the_next_ones(server: ThreadServer) -> None:
    """Another thread of the worker has found the server that came back, while this one copied."""
    client = join(server, 0)
    memory = client.memory.shared

    class Old:
        publishes = True

        def read(self, copy: Any, gone: Any) -> int:
            client.memory.shared, client.connection.restored_version = memory, 0
            return 57

    client.memory.shared = Old()  # type: ignore[assignment]
    assert pull(client) == (0, 1.0)


def test_an_update_for_a_server_that_came_back_is_of_a_version_that_this_one_has_had(server: ThreadServer) -> None:
    """The version that the worker started from, or the restored one if that is lower."""
    client = join(server, 0)
    client.connection.restored_version = 3
    assert [client._rebased(Push(0, base, 1.0)).base_version for base in (1, 3, 5)] == [1, 3, 3]


def test_updates_of_one_worker_add_up(server: ThreadServer) -> None:
    first = join(server, 0, updates_per_step=50)
    answers = [push(first, sequence, float(sequence)) for sequence in range(50)]
    assert [answer.version for answer in answers] == [0] * 49 + [1]
    assert pull(first)[1] == pytest.approx(1.0 - sum(range(50)) / 50)


def test_answers_count_the_refused_updates(server: ThreadServer) -> None:
    first, second = join(server, 0, updates_per_step=50), join(server, 1, updates_per_step=50)
    assert push(first, 0, float("nan")).refused == 1
    assert push(first, 1, 1.0).refused == 1
    assert push(second, 0, 1.0).refused == 0, "its own alone"
    answer = push(first, 2, float("inf"))
    assert answer.status is Status.REFUSED and answer.refused == 2


def test_worker_0_may_end_the_run_before_its_limits(server: ThreadServer) -> None:
    """As with --patience: the others learn of it at their next push, and the server ends after them."""
    first, second = join(server, 0), join(server, 1)
    push(first, 0, 0.5)
    first.leave(finished=True)
    assert push(second, 0, 0.5).status is Status.FINISHED
    second.leave(finished=False)
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_the_passes_of_all_workers_together_end_the_run(server: ThreadServer) -> None:
    """Ten tenths are one, though their sum in floating point is less."""
    both = join(server, 0, max_epoch=1), join(server, 1, max_epoch=1)
    finished = [push(both[number % 2], number // 2, 0.0, epochs=0.1).finished for number in range(10)]
    assert finished == [False] * 9 + [True]


def no_room(slots: Slots, peer: Peer) -> None:
    raise OSError("no room")


def test_who_waits_for_worker_0_is_answered_once_also_where_its_first_hello_fails(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the description of the run, its memory may find no room; and worker 0 may be started again."""
    second, first = (
        Client(LastingConnection(server.address, server.token, 1)),
        Client(LastingConnection(server.address, server.token, 0)),
    )
    second.connection.channel.send(encode(HELLO))
    wait_until(lambda: server.service.membership.waiting("hello") == [1])
    with monkeypatch.context() as full:
        full.setattr(Slots, "open", no_room)
        assert "no room" in ask(first, encode(HELLO))["error"]
    first.close()
    join(server, 0).close()
    join(server, 0)
    assert second.connection.channel.happens(select.POLLIN, 20.0)
    assert parse_answer(second.connection.channel.receive(), Welcome).initialised
    assert "version" in ask(second, encode(Pull())) and not second.connection.channel.happens(select.POLLIN, 0.2)


def test_a_message_arrives_whole_however_it_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        sender, receiver = Channel(left), Channel(listener.accept()[0])
    body = json.dumps({"text": "é" * 5000}).encode()
    for byte in header(len(body)) + body:
        left.sendall(bytes([byte]))
    assert receiver.receive() == body
    sender.close()
    with pytest.raises(ExchangeError, match="closed"):
        receiver.receive()
    receiver.close()


def test_a_worker_whose_update_takes_long_on_its_way_is_not_silent(tmp_path: Path) -> None:
    now = 0.0
    service = in_process.new_service(1, tmp_path, build, lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as worker:
        connection, _ = listener.accept()
        peer = service.peers[0] = Peer(Channel(connection), worker=0)
        membership = service.membership
        membership.connect(0, "x", now)
        loop = EventLoop(listener, service, connection)
        now = membership.timeout + 1
        assert membership.is_silent(0, now)
        worker.sendall(header(100) + b'{"kind"')
        select.select([connection], [], [], 10)
        loop.peers.append(peer)
        loop._serve_all([(peer, selectors.EVENT_READ)])
        assert not membership.is_silent(0, now)
        connection.close()


def _connected(listener: socket.socket, sockets: ExitStack) -> tuple[socket.socket, socket.socket]:
    theirs = sockets.enter_context(socket.create_connection(listener.getsockname()))
    return sockets.enter_context(listener.accept()[0]), theirs


def test_a_worker_whose_turn_comes_later_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message is there, and is not read yet because that of another worker has taken long."""
    monkeypatch.setattr(connection_loop, "_TURN_SECONDS", -1.0)  # every message takes long
    now = 0.0
    service = in_process.new_service(2, tmp_path, build, lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as sockets:
        loop = EventLoop(listener, service, sockets.enter_context(socket.socket()))
        for worker in range(2):
            ours, theirs = _connected(listener, sockets)
            theirs.sendall(header(100))
            select.select([ours], [], [], 10)
            service.peers[worker] = Peer(Channel(ours), worker=worker)
            service.membership.connect(worker, "x", now)
            loop.peers.append(service.peers[worker])
        now = service.membership.timeout + 1
        loop._serve_all([(peer, selectors.EVENT_READ) for peer in loop.peers])
        assert [peer.channel.has_begun for peer in loop.peers] == [True, False]
        assert not service.membership.silent(now)


def test_an_answer_that_the_clock_brings_is_sent_to_its_end_before_the_clock_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parameters to a worker far away when a grace period is over: they do not fit into the connection at once."""
    server = ThreadServer(1, tmp_path, "127.0.0.2")
    channel = join(server, 0).connection.channel
    parameters = torch.randn(8_000_000)
    channel.room = torch.zeros_like(parameters)
    channel.connection.settimeout(20)
    told: list[bool] = []

    def tick() -> float:
        if not told:
            server.service.answer(server.service.peers[0], Goodbye(), parameters)
        told.append(True)
        return 60.0

    monkeypatch.setattr(server.service, "tick", tick)
    parse_answer(channel.receive(), Goodbye)
    assert torch.equal(channel.room, parameters)
    server.stop()


@pytest.mark.parametrize("spell", [errors.as_key, errors.as_argument])
def test_a_message_of_the_server_names_options_as_the_users_of_the_worker_write_them(
    monkeypatch: pytest.MonkeyPatch, spell: Any
) -> None:
    monkeypatch.setattr(errors, "_spell", [spell])
    said = f"give {errors.as_placeholder('server_shards')} 3"
    with pytest.raises(RefusedError, match=f"^give {spell('server_shards')} 3$"):
        parse_answer(encode(ErrorReply(said)), Welcome)
