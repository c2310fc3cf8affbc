"""What somebody has listened to on one connection opens no other."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_async.errors import RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.protocol import Greeting, Introduce, Introduced, encode, parse_answer
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    with ThreadServer(2, tmp_path) as server:
        yield server


def connect(server: ThreadServer) -> tuple[Channel, str]:
    host, _, port = server.address.rpartition(":")
    channel = Channel(socket.create_connection((host, int(port)), timeout=10))
    return channel, parse_answer(channel.receive(), Greeting).challenge


def introduction(token: str, theirs: str, ours: str, role: str = "worker") -> bytes:
    own = proof(token, role, theirs, ours)
    return encode(Introduce(own, ours, worker=1, joins=False, instance="x"))


def test_an_introduction_that_was_recorded_is_refused_on_another_connection(server: ThreadServer) -> None:
    channel, theirs = connect(server)
    recorded = introduction(server.token, theirs, challenge())
    channel.send(recorded)
    assert parse_answer(channel.receive(), Introduced).worker == 1
    channel.close()
    for _ in range(2):
        again, another = connect(server)
        assert another != theirs
        again.send(recorded)
        with pytest.raises(RefusedError, match="wrong token"):
            parse_answer(again.receive(), Introduced)
        again.close()


def test_the_servers_own_proof_is_not_a_workers(server: ThreadServer) -> None:
    """Said back to the server, which would answer whoever asks with it."""
    channel, theirs = connect(server)
    channel.send(introduction(server.token, theirs, challenge(), role="server"))
    with pytest.raises(RefusedError, match="wrong token"):
        parse_answer(channel.receive(), Introduced)
    channel.close()


def test_a_servers_answer_that_was_recorded_is_not_trusted(server: ThreadServer) -> None:
    channel, theirs = connect(server)
    channel.send(introduction(server.token, theirs, challenge()))
    recorded = channel.receive()
    assert parse_answer(recorded, Introduced).worker == 1
    channel.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play_back() -> None:
            played = Channel(listener.accept()[0])
            played.send(encode(Greeting(theirs)))
            played.receive()
            played.send(recorded)

        thread = threading.Thread(target=play_back, daemon=True)
        thread.start()
        with pytest.raises(RefusedError, match="does not know this run's token"):
            Client(LastingConnection(f"127.0.0.1:{listener.getsockname()[1]}", server.token, 1))
        thread.join(10)
