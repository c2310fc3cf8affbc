"""Tensors in pieces, each on a connection of its own."""

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.channel import LEAST_PIECE, _sizes
from fairseq_async.launch import certificates
from tests.helpers.waiting import wait_until

LARGE = 3 * LEAST_PIECE  # values, so that each of twelve streams has a piece
Plug = Callable[[], tuple[socket.socket, socket.socket]]


def plain() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def channels(streams: int, plug: Plug = plain) -> tuple[Channel, Channel]:
    """Both ends of a channel with so many streams."""
    ours, theirs = map(Channel, plug())
    for _ in range(streams - 1):
        for channel, connection in zip((ours, theirs), plug(), strict=True):
            channel.add(Channel(connection))
    return ours, theirs


@pytest.fixture(params=[1, 2, 5])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = channels(request.param)
    yield ours, theirs
    ours.close()
    theirs.close()


@given(size=st.integers(0, 1 << 34), streams=st.integers(1, 16))
def test_the_pieces_are_the_whole_and_of_about_equal_size(size: int, streams: int) -> None:
    sizes = _sizes(size, streams)
    assert len(sizes) == streams and sum(sizes) == size
    if size < streams * LEAST_PIECE:
        assert sizes[0] == size
    else:
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=20, deadline=None)
@given(data=st.data(), streams=st.integers(1, 4))
def test_messages_arrive_in_their_order_and_whole(data: st.DataObject, streams: int) -> None:
    """With tensors that are divided, tensors that are not, and none, in any order."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 3, LEAST_PIECE // 4, 2 * LEAST_PIECE + 1, LARGE]), max_size=6))
    sent = [torch.randn(size) for size in sizes]
    ours, theirs = channels(streams)
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
    """The pieces come in any order; only what is awaited would wake a selector."""
    worker, server = pair
    server.room, update = torch.zeros(LARGE), torch.randn(LARGE)
    worker.queue(b"update", update)
    worker.queue(b"behind")
    streams = list(zip(worker.streams, server.streams, strict=True))
    random.Random(len(streams)).shuffle(streams)
    got: list[bytes] = []
    for ours, _ in streams:
        assert got == []
        while not ours.flush():
            got += server.messages()
    wait_until(lambda: len(got) == 2 or bool(got.extend(server.messages())))  # type: ignore[func-returns-value]
    assert got == [b"update", b"behind"] and torch.equal(server.room, update)
    assert server.awaited == [server.streams[0]]


def test_a_stream_that_ends_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    """Half a tensor is none, whichever of its connections is lost."""
    worker, server = pair
    server.room = torch.zeros(LARGE)
    worker.queue(b"update", torch.ones(LARGE))
    for stream in worker.streams[:-1]:
        stream.send()
    if len(worker.streams) > 1:
        worker.streams[-1].connection.send(b"a few")
    worker.streams[-1].end()
    with pytest.raises(ExchangeError, match="closed"):
        while True:
            server.receive()
    with pytest.raises(ExchangeError, match="closed"):
        while True:
            worker.send(b"another", torch.ones(LARGE))


@pytest.mark.parametrize(
    ("seconds", "third", "milliseconds"), [(90.0, 30, 90_000), (0.1, 1, 100), (1e9, 32_767, 2**31 - 1)]
)
def test_each_stream_notices_within_the_time_that_the_peers_machine_is_gone(
    pair: tuple[Channel, Channel], seconds: float, third: int, milliseconds: int
) -> None:
    pair[0].notice_death(seconds)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    for stream in pair[0].streams:
        assert stream.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        given = [stream.connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert given == [third, third, 2, milliseconds]


def test_a_dropped_channel_sends_nothing_more_and_a_closed_one_has_no_file_open(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert not theirs.is_closed() and not ours.is_full
    for _ in range(2):
        ours.queue(b"update", torch.ones(LARGE))
    assert ours.is_full and ours.unsent == 4, "the head and a piece of each message, on the stream with the most"
    ours.drop()
    assert ours.unsent == 0 and not ours.is_full and all(not stream.unsent for stream in ours.streams)
    assert theirs.is_closed()
    for stream in theirs.streams:
        with pytest.raises(ExchangeError, match="closed"):
            stream.read()
    ours.close()
    assert [stream.connection.fileno() for stream in ours.streams] == [-1] * len(ours.streams) and ours.is_closed()


def test_a_message_in_the_place_of_an_introduction_is_refused() -> None:
    (ours, theirs), (more, other) = map(Channel, plain()), map(Channel, plain())
    more.connection.sendall(b"\0" * 5)
    wait_until(lambda: other.messages() == [] and other.has_begun)
    with pytest.raises(ProtocolError, match="more than an introduction"):
        theirs.add(other)
    for channel in (ours, theirs, more, other):
        channel.close()


def test_encrypted_streams_lose_nothing_that_was_decrypted_early(tmp_path: Path) -> None:
    """Records may have the end of a piece and the beginning of the next one."""
    certificates.make(tmp_path, ["127.0.0.1"])

    def secured() -> tuple[socket.socket, socket.socket]:
        ours, theirs = plain()
        accepted = tls.accepted(tls.server_context(tmp_path), theirs)
        shaking = threading.Thread(target=wait_until, args=(lambda: tls.handshake(accepted),))
        shaking.start()
        connected = tls.connected(tls.worker_context(tmp_path), ours, "127.0.0.1:1")
        shaking.join(10)
        return connected, accepted

    worker, server = channels(3, secured)
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

    pieces = [update.view(torch.uint8).numpy().tobytes() for update in updates[:2]]
    each = len(pieces[0]) // 3
    for stream, begin in zip(worker.streams[1:], (each, 2 * each), strict=True):
        stream.connection.sendall(pieces[0][begin : begin + 5000])
        stream.connection.sendall(pieces[0][begin + 5000 : begin + each] + pieces[1][begin : begin + each])
    for piece, update in zip(pieces, updates[:2], strict=True):
        worker.connection.sendall(struct.pack("!IQ", 6, len(piece)) + b"update" + piece[:each])
        got = []
        wait_until(lambda got=got: bool(got.extend(server.messages()) or got))  # type: ignore[misc]
        assert got == [b"update"] and torch.equal(server.room, update)
    worker.close()
    server.close()
