"""Messages over a connection, some with a tensor behind them."""

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fairseq_async.errors import ProtocolError
from fairseq_async.exchange import Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Channel(socket.create_connection(listener.getsockname()))
        theirs = Channel(listener.accept()[0])
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_tensor_takes_its_room_only_when_all_before_it_was_handled(pair: tuple[Channel, Channel]) -> None:
    """An answer to a question before it may use the same room, and so may the next tensor."""
    ours, theirs = pair
    theirs.room = torch.zeros(3)
    ours.send(b"question")
    ours.send(b"first", torch.ones(3))
    ours.send(b"second", torch.full((3,), 2.0))
    ours.send(b"last")
    time.sleep(0.05)
    got = []
    while len(got) < 4:
        bodies = theirs.messages()
        got.append((bodies, theirs.room.tolist()))
        assert theirs.with_tensor == (bodies in ([b"first"], [b"second"]))
        theirs.room.fill_(9.0)  # an answer's
    assert got == [
        ([b"question"], [0.0] * 3),
        ([b"first"], [1.0] * 3),
        ([b"second"], [2.0] * 3),
        ([b"last"], [9.0] * 3),
    ]


def test_the_kernel_waits_in_milliseconds_and_no_longer_than_it_can(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    faked = SimpleNamespace(register=lambda connection, event: None, poll=lambda wait: waits.append(wait))
    monkeypatch.setattr("select.poll", lambda: faked)
    assert not any(pair[0].is_closed(seconds) for seconds in (0.0, 1.5, math.inf))
    assert waits == [0.0, 1500.0, 2**31 - 1]


def test_a_peer_is_sent_one_tensor_of_the_largest_size_so_far_and_64_kib_of_messages_before_it_takes_some(
    pair: tuple[Channel, Channel],
) -> None:
    ours, _ = pair
    header = struct.calcsize("!IQ")
    ours.queue(b"", torch.zeros(1000))
    ours.queue(b"x" * ((1 << 16) - 2 * header))
    assert not ours.is_full
    ours.queue(b"")
    assert ours.is_full


def test_a_message_that_is_too_long_is_refused_though_nothing_comes_behind_its_header(
    pair: tuple[Channel, Channel],
) -> None:
    ours, theirs = pair
    ours.connection.sendall(struct.pack("!IQ", 2, 0) + b"{}" + struct.pack("!IQ", theirs.largest + 1, 0))
    assert theirs.messages(1) == [b"{}"] and theirs.has_message
    with pytest.raises(ProtocolError, match=f"a message of {theirs.largest + 1} bytes was announced"):
        theirs.messages()


@pytest.mark.parametrize("local", [False, True])
def test_a_channel_that_makes_room_has_new_memory_for_each_tensor(pair: tuple[Channel, Channel], local: bool) -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair()) if local else pair
    theirs.makes_room = True
    taken = []
    for tensor in (torch.ones(3), torch.full((30_000,), 2.0), None):
        ours.send(b"message", tensor)
        assert theirs.receive() == b"message"
        taken.append(theirs.room)
    assert [None if each is None else each.view(torch.float32).tolist() for each in taken] == [
        [1.0] * 3,
        [2.0] * 30_000,
        None,
    ]
    ours.connection.sendall(struct.pack("!IQ", 2, 1 << 63) + b"{}")
    with pytest.raises(ProtocolError, match="a tensor was announced that is not of the model's size"):
        theirs.receive()
    for channel in (ours, theirs):
        channel.close()


@pytest.mark.parametrize("tensor", [None, torch.ones(3)], ids=["a body", "a tensor"])
def test_a_message_that_is_held_back_arrives_whole_when_its_end_is_queued(
    pair: tuple[Channel, Channel], tensor: torch.Tensor | None
) -> None:
    ours, theirs = pair
    theirs.room = torch.zeros(3)
    ours.queue(b"before")
    ours.queue(b"held", tensor)
    release = ours.hold_back()
    assert ours.flush() and theirs.receive() == b"before"
    assert not theirs.is_closed(0.05) and theirs.messages() == [] and theirs.has_begun != (tensor is not None)
    release()
    assert ours.flush() and theirs.receive() == b"held" and theirs.with_tensor == (tensor is not None)
    assert theirs.room.tolist() == [float(tensor is not None)] * 3


def test_a_channel_that_waits_takes_what_comes_for_two_others_meanwhile(pair: tuple[Channel, Channel]) -> None:
    """Else a peer whose buffer is full would wait for a reader that waits for another peer."""
    ends = [pair, *(tuple(Channel(end) for end in socket.socketpair()) for _ in range(2))]
    sending, receiving = zip(*ends, strict=True)
    for number, channel in enumerate(receiving):
        channel.room = torch.zeros(100_000 + number)
    receiving[0].companions = receiving[1:]
    sent = [torch.full((100_000 + number,), 1.0 + number) for number in range(3)]

    got: list[bytes] = []

    def send() -> None:
        for number in (2, 1, 0):
            sending[number].send(b"part %d" % number, sent[number])

    def receive() -> None:
        got.extend(channel.receive() for channel in receiving)

    threads = [threading.Thread(target=each, daemon=True) for each in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == [b"part 0", b"part 1", b"part 2"]
    assert all(torch.equal(channel.room, tensor) for channel, tensor in zip(receiving, sent, strict=True))
    for end in ends[1:]:
        for channel in end:
            channel.close()
