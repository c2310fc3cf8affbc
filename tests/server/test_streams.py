"""A worker on another machine with several connections, each of which carries a piece of its tensors."""

import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.exchange.channel import LEAST_PIECE
from fairseq_async.launch import certificates
from fairseq_async.options.config import MOST_STREAMS
from fairseq_async.protocol import Greeting, Introduce, Introduced, Layout, Push, encode, parse_answer
from fairseq_async.protocol.client_connection import Connection
from fairseq_async.records.events import read_events
from fairseq_async.worker.connection.client import Client
from scripts.faults.adder import adder_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.waiting import wait_until

LARGE = Layout.of([("weight", torch.zeros(4 * LEAST_PIECE))])  # of which each of 16 streams has a piece
SPEC = adder_spec()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    server = ThreadServer(2, tmp_path, "127.0.0.2")
    yield server
    server.stop()


class Worker:
    """Sends gradients of which no two elements are equal, and adds them up."""

    def __init__(self, client: Client) -> None:
        self.client, self.sequence, self.expected = client, 0, torch.zeros(LARGE.size)
        if not client.join(LARGE, SPEC).initialised:
            client.slot.zero_()
            client.initialise(None)

    def step(self) -> None:
        gradient = torch.randn(LARGE.size)
        self.client.push(lambda slot: slot.copy_(gradient), Push(self.sequence, self.sequence, 1.0))
        self.expected -= gradient
        self.sequence += 1

    def parameters(self) -> Tensor:
        taken = torch.empty(LARGE.size)
        self.client.pull(taken.copy_)
        return taken


def connections(server: ThreadServer) -> list[int]:
    """How many each peer has."""
    return sorted(len(peer.channel.streams) for peer in server._loop.peers)


@pytest.mark.parametrize("streams", [1, 2, MOST_STREAMS])
def test_every_value_arrives_at_its_place_in_both_directions(server: ThreadServer, streams: int) -> None:
    worker = Worker(Client(server.address, server.token, 0, streams=streams))
    wait_until(lambda: connections(server) == [streams])
    for _ in range(3):
        worker.step()
        assert torch.equal(worker.parameters(), worker.expected)
    worker.client.leave(finished=False)
    wait_until(lambda: connections(server) == [])


def test_parameters_arrive_over_encrypted_streams(tmp_path: Path) -> None:
    certificates.make(tmp_path / "tls", ["127.0.0.2"])
    server = ThreadServer(2, tmp_path / "run", "127.0.0.2", tls=tmp_path / "tls")
    worker = Worker(Client(server.address, server.token, 0, tls=tmp_path / "tls", streams=3))
    for _ in range(3):
        worker.step()
        assert torch.equal(worker.parameters(), worker.expected)
    worker.client.close()
    server.stop()


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("side", ["worker", "server"])
def test_when_a_connection_is_lost_all_are_made_again_and_the_update_counts_once(
    server: ThreadServer, tmp_path: Path, lost: int, side: str
) -> None:
    worker = Worker(Client(server.address, server.token, 0, 30.0, streams=3))
    worker.step()
    channel = worker.client._channel if side == "worker" else server._loop.peers[0].channel
    channel.streams[lost].end()
    worker.step()
    assert torch.equal(worker.parameters(), worker.expected)
    wait_until(lambda: connections(server) == [3])
    assert [event.sequence for event in read_events(tmp_path / "events.jsonl")] == [0, 1]


def test_on_the_same_machine_there_is_one_connection(tmp_path: Path) -> None:
    server = ThreadServer(1, tmp_path)
    worker = Worker(Client(server.address, server.token, 0, streams=3))
    assert connections(server) == [1]
    worker.client.close()
    server.stop()


def introduce(server: ThreadServer, stream_of: str, token: str | None = None, behind: bytes = b"") -> Channel:
    """A connection that introduces itself as a stream of another one; ``behind`` is a message in the same packet."""
    host, _, port = server.address.rpartition(":")
    channel = Channel(socket.create_connection((host, int(port)), timeout=10))
    theirs, ours = parse_answer(channel.receive(), Greeting).challenge, challenge()
    own = proof(token or server.token, "worker", theirs, ours)
    bodies = [encode(Introduce(own, ours, 0, False, "x", stream_of)), *([behind] if behind else [])]
    channel.connection.sendall(b"".join(struct.pack("!IQ", len(body), 0) + body for body in bodies))
    return channel


@pytest.mark.parametrize(
    ("which", "token", "message"),
    [
        (lambda peer: peer.challenge, "another token of a run", "wrong token"),
        (lambda peer: "0" * len(peer.challenge), None, "no worker that has introduced itself"),
    ],
)
def test_who_does_not_know_token_and_challenge_brings_no_pieces(
    server: ThreadServer, which: Callable[..., str], token: str | None, message: str
) -> None:
    client = Client(server.address, server.token, 0)
    with pytest.raises(RefusedError, match=message):
        parse_answer(introduce(server, which(server._loop.peers[0]), token).receive(), Introduced)
    wait_until(lambda: connections(server) == [1])
    worker = Worker(client)
    worker.step()
    assert torch.equal(worker.parameters(), worker.expected)


def test_nothing_is_added_to_a_worker_that_has_joined(server: ThreadServer) -> None:
    """The ends would divide its tensors differently."""
    worker = Worker(Client(server.address, server.token, 0, streams=2))
    with pytest.raises(RefusedError, match="and not said hello"):
        parse_answer(introduce(server, server._loop.peers[0].challenge).receive(), Introduced)
    worker.step()
    assert torch.equal(worker.parameters(), worker.expected)


@pytest.mark.parametrize("behind", [b"{", b'{"kind": "alive"}', b'{"kind": "leave", "finished": true}'])
def test_a_message_behind_the_introduction_of_a_stream_ends_its_own_worker_alone(
    server: ThreadServer, behind: bytes
) -> None:
    honest = Worker(Client(server.address, server.token, 0, streams=2))
    hostile = Client(server.address, server.token, 1)
    (peer,) = [peer for peer in server._loop.peers if peer.worker == 1]
    introduce(server, peer.challenge, behind=behind)
    wait_until(lambda: connections(server) == [2])
    assert hostile._channel.is_closed(10) and server.service.refusals.counts == {"no message": 1}
    honest.step()
    assert torch.equal(honest.parameters(), honest.expected) and not server.service.finished


@pytest.mark.parametrize("lost", [1, 2])
def test_a_worker_whose_first_connection_is_lost_while_it_makes_the_others_tries_again(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """As on a line that breaks, or when the server is started again at that time."""
    worker = Worker(Client(server.address, server.token, 0, 30.0, streams=4))
    added, add = [], Connection.add

    def cut(connection: Connection, other: Channel) -> None:
        add(connection, other)
        added.append(other)
        if len(added) == lost:
            peer = server.service.peers[0]
            peer.channel.end()
            wait_until(lambda: peer not in server._loop.peers)

    monkeypatch.setattr(Connection, "add", cut)
    worker.client._channel.end()
    worker.step()
    assert torch.equal(worker.parameters(), worker.expected) and len(added) == lost + 3


def test_a_worker_has_so_many_streams_at_most(server: ThreadServer) -> None:
    with pytest.raises(ExchangeError, match=f"{MOST_STREAMS} connections at most"):
        Client(server.address, server.token, 0, streams=MOST_STREAMS + 1)
