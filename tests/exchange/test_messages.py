"""Messages with tensors behind them, sent and received in any order of events, plain and encrypted."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_async.errors import ExchangeError
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.authentication import read_token, write_token
from fairseq_async.launch import certificates
from tests.helpers.waiting import wait_until

LARGE = 50_000  # values: more than a TLS record, and than a socket takes at once


def plain() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, plain())
    yield ours, theirs
    ours.close()
    theirs.close()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_arrive_in_their_order_and_whole(data: st.DataObject) -> None:
    """With large tensors, small ones, and none, in any order."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 3, 4096, 40_000, LARGE]), max_size=6))
    sent = [torch.randn(size) for size in sizes]
    ours, theirs = map(Channel, plain())
    theirs.any_length, theirs.room = True, torch.zeros(LARGE)

    def send() -> None:
        for at, each in enumerate(sent):
            ours.send(b"%d" % at, each)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for at, each in enumerate(sent):
            assert theirs.receive() == b"%d" % at and theirs.tensor_bytes == 4 * each.numel()
            assert torch.equal(theirs.room[: each.numel()], each)
        sending.result(20)
    ours.close()
    theirs.close()


def test_a_server_reads_what_is_there_and_waits_for_nothing(pair: tuple[Channel, Channel]) -> None:
    worker, server = pair
    server.room, update = torch.zeros(LARGE), torch.randn(LARGE)
    worker.queue(b"update", update)
    worker.queue(b"behind")
    got: list[bytes] = []
    while not worker.flush():
        got += server.messages()
    wait_until(lambda: len(got) == 2 or bool(got.extend(server.messages())))  # type: ignore[func-returns-value]
    assert got == [b"update", b"behind"] and torch.equal(server.room, update)


def test_a_connection_that_ends_in_the_middle_of_a_tensor_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    """Half a tensor is none."""
    worker, server = pair
    server.room = torch.zeros(LARGE)
    worker.connection.sendall(struct.pack("!IQ", 6, 4 * LARGE) + b"update" + b"a few")
    worker.end()
    with pytest.raises(ExchangeError, match="closed"):
        while True:
            server.receive()
    with pytest.raises(ExchangeError, match="closed"):
        while True:
            worker.send(b"another", torch.ones(LARGE))


@pytest.mark.parametrize(
    ("seconds", "third", "milliseconds"), [(90.0, 30, 90_000), (0.1, 1, 100), (1e9, 32_767, 2**31 - 1)]
)
def test_a_channel_notices_within_the_time_that_the_peers_machine_is_gone(
    pair: tuple[Channel, Channel], seconds: float, third: int, milliseconds: int
) -> None:
    pair[0].notice_death(seconds)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    connection = pair[0].connection
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    given = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert given == [third, third, 2, milliseconds]


def test_a_dropped_channel_sends_nothing_more_and_a_closed_one_has_no_file_open(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert not theirs.is_closed() and not ours.is_full
    for _ in range(2):
        ours.queue(b"update", torch.ones(LARGE))
    assert ours.is_full and ours.unsent == 4, "the head and the tensor of each message"
    ours.drop()
    ours.queue(b"one tensor of these may wait", torch.ones(LARGE))
    ours.queue(b"and a small one", torch.ones(1))
    assert not ours.is_full
    ours.drop()
    assert ours.unsent == 0 and not ours.is_full
    assert theirs.is_closed()
    with pytest.raises(ExchangeError, match="closed"):
        theirs.receive()
    ours.close()
    assert ours.connection.fileno() == -1 and ours.is_closed()


def test_an_encrypted_connection_loses_nothing_that_was_decrypted_early(tmp_path: Path) -> None:
    """Records may have the end of a tensor and the beginning of the next message."""
    certificates.make(tmp_path, ["127.0.0.1"])

    def secured() -> tuple[socket.socket, socket.socket]:
        ours, theirs = plain()
        accepted = tls.accepted(tls.server_context(tmp_path), theirs)
        shaking = threading.Thread(target=wait_until, args=(lambda: tls.handshake(accepted),))
        shaking.start()
        connected = tls.connected(tls.worker_context(tmp_path), ours, "127.0.0.1:1")
        shaking.join(10)
        return connected, accepted

    worker, server = map(Channel, secured())
    worker.room, server.room = torch.zeros(LARGE), torch.zeros(LARGE)
    updates = [torch.randn(LARGE) for _ in range(3)]
    for update in updates:
        server.queue(b"parameters", update)
    flushed = threading.Thread(target=wait_until, args=(server.flush,))
    flushed.start()
    for update in updates:
        assert worker.receive() == b"parameters" and torch.equal(worker.room, update)
    flushed.join(10)

    def send() -> None:
        for update in updates:
            worker.send(b"update", update)

    sending = threading.Thread(target=send)
    sending.start()
    for update in updates:
        got: list[bytes] = []
        wait_until(lambda got=got: bool(got.extend(server.messages()) or got))  # type: ignore[misc]
        assert got == [b"update"] and torch.equal(server.room, update)
    sending.join(10)

    bodies = [
        struct.pack("!IQ", 6, 4 * LARGE) + b"update" + each.view(torch.uint8).numpy().tobytes() for each in updates
    ]
    both, half = bodies[0] + bodies[1], len(bodies[0]) + 5000
    got = []
    for part in (both[:5000], both[5000:half], both[half:]):
        sending = threading.Thread(target=worker.connection.sendall, args=(part,))
        sending.start()
        while sending.is_alive():
            got += server.messages()
        sending.join(10)
    wait_until(lambda: len(got) == 2 or bool(got.extend(server.messages())))  # type: ignore[func-returns-value]
    assert torch.equal(server.room, updates[1])
    worker.close()
    server.close()


def test_a_token_takes_the_place_of_one_before_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    for token in ("a" * 32, "b" * 16):
        write_token(tmp_path / ".token", token)
        assert read_token(tmp_path / ".token") == token and (tmp_path / ".token").stat().st_mode & 0o777 == 0o600
