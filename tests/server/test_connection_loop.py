"""Whom a server's loop over its connections hears, in which order, and whom it disconnects."""

import errno
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.channel import AT_A_TIME
from fairseq_async.server.network import connection_loop
from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.network.connections import SMALL, Peer, RefusalLog

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Handler = Callable[[Peer, bytes], None]


class Noting:
    """A service that notes whom it hears."""

    def __init__(self) -> None:
        self.refusals, self.now = RefusalLog(), 0.0
        self.greeted, self.noted, self.gone = list[Peer](), list[Peer](), list[Peer]()
        self.received = list[tuple[Peer, bytes]]()
        self.handler: Handler = lambda peer, body: None
        self.greet, self.note_message, self.disconnected = self.greeted.append, self.noted.append, self.gone.append

    def clock(self) -> float:
        return self.now

    def receive(self, peer: Peer, body: bytes) -> None:
        self.received.append((peer, body))
        self.handler(peer, body)


class Connections:
    """A loop, and peers whose other ends are sockets of the test."""

    def __init__(self) -> None:
        self.service, self.ends = Noting(), dict[Peer, socket.socket]()
        self.loop = ConnectionLoop(socket.create_server(("127.0.0.1", 0)), self.service, None)

    def peer(self, messages: int = 0, **known: Any) -> Peer:
        """A peer that has sent so many messages, each of which is its number."""
        ours, theirs = socket.socketpair()
        theirs.sendall(b"".join(struct.pack("!IQ", 1, 0) + bytes([number]) for number in range(messages)))
        peer = Peer(Channel(ours, SMALL), **known)
        self.ends[peer] = theirs
        self.loop.peers.append(peer)
        return peer

    def serve(self, *peers: Peer, events: int = READ) -> list[tuple[Peer, bytes]]:
        """Serves peers whose sockets are ready, and returns the messages that were handled."""
        before = len(self.service.received)
        self.loop._serve_all([(peer, events) for peer in peers])
        return self.service.received[before:]

    def close(self) -> None:
        self.loop.listener.close()
        for peer, end in self.ends.items():
            end.close()
            peer.channel.connection.close()


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections()
    yield made
    made.close()


def closed(connections: Connections) -> list[Peer]:
    """The peers that see their connections closed."""
    return [peer for peer, end in connections.ends.items() if end.fileno() >= 0 and _has_ended(end)]


def _has_ended(end: socket.socket) -> bool:
    try:
        return end.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it had sent more than was read
        return True


def test_a_stranger_has_ten_seconds_unless_nobody_has_read_what_it_sent(connections: Connections) -> None:
    late, just = connections.peer(since=89.9), connections.peer(since=90.0)
    waits, has_turn = connections.peer(since=1.0), connections.peer(1, since=1.0)
    has_turn.channel._gather()
    worker = connections.peer(since=1.0, worker=3)
    connections.service.now = 100.0
    connections.loop._close_strangers({waits})
    assert connections.loop.peers == [just, waits, has_turn, worker]
    assert closed(connections) == connections.service.gone == [late]
    assert connections.service.refusals.counts == {"no introduction": 1}


def test_of_too_many_strangers_of_an_address_the_oldest_that_has_not_begun_is_closed(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_loop, "_MOST_STRANGERS", 2)
    monkeypatch.setattr(connection_loop, "_MOST_IN_ALL", 3)
    begun, young, old = (connections.peer(since=since, address="a") for since in (3.0, 9.0, 5.0))
    begun.channel._received += b"\0"
    other, worker = connections.peer(since=1.0, address="b"), connections.peer(since=0.0, address="a", worker=1)
    for _ in range(2):
        connections.loop._close_strangers(set())
        assert connections.loop.peers == [begun, young, other, worker], "neither address has more than two now"
    last = connections.peer(since=2.0, address="b")
    connections.loop._close_strangers(set())
    assert connections.loop.peers == [begun, other, worker, last], "of all addresses there were four"
    assert connections.service.gone == [old, young]


def test_of_too_many_strangers_one_that_has_shown_a_certificate_stays(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_loop, "_MOST_STRANGERS", 1)
    certified, young = connections.peer(since=1.0, secured=True), connections.peer(since=9.0)
    connections.loop._close_strangers(set())
    assert connections.loop.peers == [certified] and connections.service.gone == [young]


def test_a_late_stranger_that_is_one_too_many_is_closed_once(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_loop, "_MOST_STRANGERS", 0)
    peer, connections.service.now = connections.peer(), 11.0
    connections.loop._close_strangers(set())
    assert connections.service.gone == [peer] and connections.service.refusals.counts == {"no introduction": 1}


def test_a_worker_has_so_many_messages_at_a_time_and_the_others_in_a_later_turn(connections: Connections) -> None:
    peer, quiet = connections.peer(AT_A_TIME + 4, worker=2), connections.peer()
    assert [body[0] for _, body in connections.serve(peer, quiet)] == list(range(AT_A_TIME))
    assert connections.service.noted == [peer, quiet] and connections.loop.has_turns
    assert [body[0] for _, body in connections.serve()] == list(range(AT_A_TIME, AT_A_TIME + 4))
    assert connections.service.noted == [peer, quiet, peer] and not connections.loop.has_turns
    assert connections.serve() == []


def test_where_a_message_takes_long_the_sockets_are_looked_at_before_the_next(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stranger has sent behind its introduction is judged with it."""
    monkeypatch.setattr(connection_loop, "_TURN_SECONDS", -1.0)
    first, second, stranger = connections.peer(2, worker=0), connections.peer(1, worker=1), connections.peer(3)
    assert connections.serve(first, second) == [(first, b"\0")]
    assert connections.service.noted == [first, second], "both are alive"
    assert connections.serve(second) == [(second, b"\0")], "it has taken less"
    assert connections.serve() == [(first, b"\1")]
    assert [body for _, body in connections.serve(stranger)] == [b"\0", b"\1", b"\2"]


def test_a_peer_that_was_closed_in_the_turn_of_another_is_not_served(connections: Connections) -> None:
    first, second = connections.peer(1, worker=0), connections.peer(1, worker=1)
    connections.service.handler = lambda peer, body: connections.loop._close(second)
    assert connections.serve(first, second) == [(first, b"\0")]
    assert connections.loop.peers == [first] and closed(connections) == [second]


def test_a_worker_that_has_another_connection_is_not_heard_on_the_old_one(connections: Connections) -> None:
    peer, other = connections.peer(3, worker=0), connections.peer(1, worker=1)
    connections.service.handler = lambda peer, body: setattr(peer, "replaced", True)
    assert connections.serve(peer, other) == [(peer, b"\0"), (other, b"\0")]
    assert closed(connections) == connections.service.gone == [peer] and connections.loop.peers == [other]
    assert not connections.service.refusals.counts


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProtocolError("none"), "worker 4: none"),
        (MemoryError(), "no memory for what it sends"),
        (ExchangeError("gone"), ""),
    ],
    ids=["no message", "no memory", "gone"],
)
def test_an_error_in_a_peers_turn_ends_its_connection_and_no_other(
    connections: Connections, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def fail(peer: Peer, body: bytes) -> None:
        if peer.worker == 4:
            raise error

    connections.service.handler = fail
    bad, good = connections.peer(2, worker=4), connections.peer(1, worker=5)
    assert connections.serve(bad, good) == [(bad, b"\0"), (good, b"\0")]
    assert closed(connections) == connections.service.gone == [bad] and connections.loop.peers == [good]
    assert connections.service.refusals.counts == ({"no message": 1} if said else {})
    assert said in capsys.readouterr().err


def test_an_introduction_places_a_peer_behind_all_others_and_each_turn_is_charged(connections: Connections) -> None:
    turns = connections.loop._turns
    worker, stranger = connections.peer(1, worker=0), connections.peer(1)
    turns._last = 5.0
    connections.service.handler = lambda peer, body: setattr(peer, "worker", 7)
    connections.serve(worker, stranger)
    assert 0.0 < worker.virtual_time < 5.0 and stranger.virtual_time == turns._last == 5.0
    quiet = connections.peer(1)
    connections.service.handler = lambda peer, body: None
    connections.serve(quiet)
    assert quiet.virtual_time < 5.0, "it has not introduced itself"


def watched(connections: Connections, peer: Peer) -> int:
    connections.loop._watch()
    key = connections.loop._selector.get_map().get(peer.channel.connection.fileno())
    return 0 if key is None else key.events


def test_a_peer_that_must_take_its_answers_first_is_not_heard_and_only_watched_for_that(
    connections: Connections,
) -> None:
    peer, quiet = connections.peer(2, worker=0), connections.peer(worker=1)
    assert (watched(connections, peer), watched(connections, quiet)) == (READ, READ)
    peer.channel.queue(b"an answer")
    assert watched(connections, peer) == READ | WRITE
    peer.channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
    peer.channel._gather()  # its messages are read
    peer.channel.queue(b"x" * (1 << 18))
    assert watched(connections, peer) == WRITE and not connections.loop.has_turns
    assert connections.serve(peer) == [], "its answers wait"
    connections.serve(peer, events=WRITE)
    while peer.channel.unsent:
        connections.ends[peer].recv(1 << 16)
        connections.serve(peer, events=WRITE)
    assert [body for _, body in connections.service.received][-2:] == [b"\0", b"\1"], "a later turn brought both"
    assert watched(connections, peer) == READ


def test_a_peer_with_a_turn_whose_socket_takes_an_answer_has_both(connections: Connections) -> None:
    peer = connections.peer(1, worker=0)
    peer.channel._gather()
    peer.channel.queue(b"an answer")
    unread = connections.peer(1, worker=1)
    assert connections.serve(peer, unread, events=WRITE) == [(peer, b"\0")] and not peer.channel.unsent


def test_a_connection_is_greeted_at_once_and_one_that_cannot_be_accepted_ends_nothing(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, service = connections.loop, connections.service
    service.now, loop._turns._present = 7.0, 3.0
    with socket.create_connection(loop.listener.getsockname()) as there:
        loop.serve_once(10.0)
        (peer,) = service.greeted
        there.sendall(struct.pack("!IQ", 1, 0) + b"x")
        loop.serve_once(10.0)
        assert service.received == [(peer, b"x")] and loop.peers == [peer]
        assert (peer.since, peer.address, peer.channel.largest) == (7.0, "127.0.0.1", SMALL)
        assert 3.0 <= peer.virtual_time < 4.0
        peer.channel.queue(b"an answer")
        loop.serve_once(0.0)
        assert loop._selector.get_key(peer.channel.connection).events == READ | WRITE
        service.now, descriptor = 17.1, peer.channel.connection.fileno()
        loop.serve_once(10.0)  # it takes the answer, so that its socket is ready
        loop.serve_once(0.0)
        assert service.gone == [peer] and descriptor not in loop._selector.get_map()
        service.refusals.counts.clear()
    full = SimpleNamespace(accept=lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
    monkeypatch.setattr(loop, "listener", full)
    pauses = list[float]()
    monkeypatch.setattr("fairseq_async.server.network.connection_loop.time.sleep", pauses.append)
    loop._accept()
    assert service.refusals.counts == {"connection": 1} and loop.peers == [] and pauses == [0.05]


def test_a_flood_of_refusals_writes_few_lines_of_each_kind_and_short_ones(capsys: pytest.CaptureFixture[str]) -> None:
    log = RefusalLog()
    written = [log.count("malformed message", "worker 1", "x" * 10_000) for _ in range(9)]
    assert [number for number, was in enumerate(written, 1) if was] == [1, 2, 4, 8]
    assert log.count("files", "worker 1", "another kind") and log.counts == {"malformed message": 9, "files": 1}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 300
