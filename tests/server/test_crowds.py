"""Who sends as fast as it can, or takes no answers, does not hold up the others."""

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from fairseq_async.errors import ExchangeError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.protocol import (
    Greeting,
    Introduce,
    Introduced,
    Layout,
    Pull,
    PullReply,
    Status,
    encode,
    parse_answer,
)
from fairseq_async.server.service import Service
from fairseq_async.server.slots import Slots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.sgd_server import sgd_spec
from tests.helpers.server_client import StartThreadServer, join, push
from tests.helpers.waiting import wait_until


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
    connection = greedy.connection.channel.connection
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
        client.connection.channel.connection.sendall((struct.pack("!IQ", len(body), 0) + body) * 512)
        with suppress(ExchangeError):
            while not ended.is_set():
                client.connection.channel.receive()

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
            client.connection.channel.end()
        for each in asking:
            each.result(10)
    assert max(before) <= 4, before


def test_who_does_not_take_large_answers_is_not_heard_until_it_does(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters ahead are encoded for each question: the answers that wait would fill the memory."""
    server = start_thread_server(2)
    large, spec = Layout.of([("weight", torch.zeros(1_000_000))]), sgd_spec(workers=2, compress={"pull": "int8"})
    honest, greedy = (Client(LastingConnection(server.address, server.token, worker)) for worker in (0, 1))
    honest.join(large, spec)
    honest.slot.zero_()
    honest.initialise(None)
    greedy.join(large, spec)
    connection = greedy.connection.channel.connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # far less than an answer
    server.service.peers[1].channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    handed_out: list[int] = []
    give = Slots.give

    def counted(slots: Slots, server: Any, worker: int, pull: Pull) -> Any:
        handed_out.append(worker)
        return give(slots, server, worker, pull)

    monkeypatch.setattr(Slots, "give", counted)
    for number in range(12):
        greedy.connection.channel.send(encode(Pull(1.0 + number / 64, starts=True)))
    for number in range(3):
        assert push(honest, number, 0.5, base=number).status is Status.APPLIED
    assert handed_out.count(1) == 2 and 1 in server.service.peers
    channel = greedy.connection.channel
    channel.room, channel.any_length = torch.empty(4_000_000, dtype=torch.uint8), True
    for _ in range(12):
        assert parse_answer(greedy.connection.channel.receive(), PullReply).compressed
    assert handed_out.count(1) == 12


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


def test_a_worker_that_has_begun_to_introduce_itself_stays_though_others_of_its_address_are_younger(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_async.server.network.connection_loop._HANDSHAKE_SECONDS", 1e6)  # on a busy machine
    monkeypatch.setattr("fairseq_async.server.network.connection_loop._MOST_STRANGERS", 8)
    server = start_thread_server(2)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as slow, ExitStack() as crowd:
        channel = Channel(slow)
        theirs, ours = parse_answer(channel.receive(), Greeting).challenge, challenge()
        own = proof(server.token, "worker", theirs, ours)
        body = encode(Introduce(own, ours, 1, joins=False, instance="x"))
        slow.sendall(struct.pack("!IQ", len(body), 0) + body[:9])
        wait_until(lambda: any(peer.has_begun for peer in server._loop.peers))
        for _ in range(12):
            crowd.enter_context(socket.create_connection((host, int(port))))
        wait_until(lambda: server.service.refusals.counts["no introduction"] == 13 - 8)
        slow.sendall(body[9:])
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
