"""Messages between workers and server over TCP: each is a body of bytes, optionally with a flat fp32 tensor behind it.

Between machines all of the exchange goes over TCP, with one connection per worker, so that only one port needs to be
open, a tunnel can carry it, and a peer's death shows on its own connection alone. On long-distance lines, where one
connection does not use the whole bandwidth, a worker may have several: then each carries a piece of every large tensor.
"""

import select
import socket
import struct
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

from fairseq_async.errors import ProtocolError
from fairseq_async.exchange.stream import LONGEST_MS, Stream

_HEADER = struct.Struct("!IQ")  # bytes of the body, bytes of the tensor behind it
AT_A_TIME = 16  # messages of one peer that are handled before the others have their turn
LARGEST = 1 << 24  # bytes; a model's layout is the largest message and needs about 100 bytes a tensor
# bytes; a tensor with fewer bytes per stream goes on the first stream alone. Hazard: a TLS record has no more, so that
# a piece is never received and decrypted as a whole before it is awaited: of decrypted bytes no selector tells.
LEAST_PIECE = 1 << 14
_LARGEST_ROOM = 1 << 46  # bytes of new memory for one tensor: less than that raises no error but a MemoryError
_BETWEEN = 1 << 16  # bytes of messages that may wait in addition to one tensor


class Channel:
    """The connection to one peer, for whole messages: a message that the peer breaks off in the middle is dropped.

    Attributes:
        connection: socket of the first stream, which carries the messages.
        streams: the first stream, and others that carry only pieces of tensors. Both ends have them in the same order,
            and divide a tensor in the same way.
        room: where the tensor behind a message is received; None accepts none. It is overwritten as the bytes arrive.
        largest: number of bytes that a message of the peer may have.
        makes_room: whether each message's tensor, of whatever size, gets new memory as its ``room``; it is None after
            a message without one. For a peer that is trusted.
        any_length: whether the tensor behind a message may be shorter than its room, as a compressed payload is.
        with_tensor: whether the last message had a tensor behind it.
        tensor_bytes: number of bytes of that tensor.
        companions: channels that receive their own next message while this one waits for its own; their :meth:`receive`
            returns it.
    """

    def __init__(self, connection: socket.socket, largest: int = LARGEST) -> None:
        self.connection = connection
        self._first = Stream(connection)
        self.streams = [self._first]
        self.largest = largest
        self.with_tensor = self.any_length = self.makes_room = False
        self.tensor_bytes = 0
        self.room: Tensor | None = None
        self.companions: Sequence[Channel] = ()
        self._received = bytearray()
        self._body: bytes | None = None  # body of a message whose tensor is on its way
        self._largest_sent = 0  # bytes of the largest tensor that was queued so far

    def is_closed(self, seconds: float = 0.0) -> bool:
        """Whether the peer ends the connection within this time, or has ended it; bytes may be left to be read."""
        return self.happens(select.POLLRDHUP, seconds)

    def happens(self, event: int, seconds: float) -> bool:
        """Whether the first stream has this event of ``select.poll`` within the time, or is closed."""
        if self.connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.connection, event)
        return bool(poll.poll(min(1000 * seconds, LONGEST_MS)))

    def add(self, other: "Channel") -> None:
        """Takes over the connection of another channel as a further stream; both ends do so between two messages.

        Raises:
            ProtocolError: unread bytes are left on the other channel.
        """
        if other.has_begun:
            raise ProtocolError("more than an introduction came on a connection for pieces of tensors")
        self.streams.append(other._first)

    def notice_death(self, seconds: float) -> None:
        """Lets the kernel close the connections when the peer's machine has been silent for this long.

        A process that ends closes its connections itself; a machine or network that fails does not.
        """
        for stream in self.streams:
            stream.notice_death(seconds)

    def send(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Sends one message; returns when the kernel has taken all of it."""
        self.queue(body, tensor)
        if len(self.streams) == 1:
            return self._first.send()
        while not self.flush():
            _wait([stream for stream in self.streams if stream.unsent], select.POLLOUT)

    def hold_back(self) -> Callable[[], None]:
        """Lets the peer wait for the end of the message that was queued last; returns what queues that end."""
        stream = next(stream for stream in reversed(self.streams) if stream.unsent)
        end = stream.hold_back()
        return lambda: stream.queue(end)

    def queue(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Queues one message for :meth:`flush`; the tensor must not change before it is sent."""
        bulk = memoryview(b"") if tensor is None else _bytes(tensor)
        self._largest_sent = max(self._largest_sent, bulk.nbytes)
        self._first.queue(memoryview(_HEADER.pack(len(body), bulk.nbytes) + body))
        for stream, piece in zip(self.streams, self._pieces(bulk), strict=True):
            stream.queue(piece)

    def flush(self) -> bool:
        """Sends as much of the queue as the connections take without waiting; True when nothing is left."""
        return all([stream.flush() for stream in self.streams])

    @property
    def unsent(self) -> int:
        """Number of parts of messages that wait for :meth:`flush` on the stream with the most."""
        return max(stream.unsent for stream in self.streams)

    @property
    def is_full(self) -> bool:
        """Whether more than one tensor waits for :meth:`flush`; each of them may have memory of its own."""
        return sum(stream.unsent_bytes for stream in self.streams) > self._largest_sent + _BETWEEN

    def drop(self) -> None:
        """Ends the connections, and drops the messages that were not sent yet."""
        for stream in self.streams:
            stream.drop()
        self.end()

    def receive(self) -> bytes:
        """Waits for the next message, and returns its body.

        Raises:
            ExchangeError: the peer closed the connection; as a ProtocolError: it announced a message or tensor whose
                size is not allowed.
        """
        while (message := self._next()) is None:
            others = [other for other in self.companions if not other._is_whole]
            awaited = [*self.awaited, *(stream for other in others for stream in other.awaited)]
            if len(awaited) == 1:
                self._read(awaited[0])
                continue
            _wait(awaited, select.POLLIN)
            for channel in (self, *others):
                channel._gather()
        return message

    def _gather(self) -> None:
        """Receives what is there of the next message."""
        self._read_what_is_there()
        if self._body is None:
            self._begin_message()

    @property
    def _is_whole(self) -> bool:
        return self._body is not None and self._complete

    def messages(self, most: int = AT_A_TIME) -> list[bytes]:
        """Reads without waiting, and returns the messages that are complete, at most ``most`` of them.

        A message with a tensor behind it is returned alone: requests before or after it may need the same room.

        Raises:
            ExchangeError: as :meth:`receive`.
        """
        complete: list[bytes] = []
        if not self.has_message:
            self._read_what_is_there()
        while len(complete) < most and not (complete and self._tensor_is_next):
            if (message := self._next()) is None:
                break
            complete.append(message)
            if self.with_tensor:
                break
        return complete

    @property
    def _tensor_is_next(self) -> bool:
        return len(self._received) >= _HEADER.size and _HEADER.unpack_from(self._received)[1] > 0

    @property
    def has_begun(self) -> bool:
        """Whether bytes of a message were read that was not returned yet."""
        return bool(self._received)

    @property
    def has_message(self) -> bool:
        """Whether a message was read and not returned yet, of which no selector tells. Pieces of its tensor may still
        be on their way on other streams."""
        if self._body is not None:
            return self._complete
        if len(self._received) < _HEADER.size:
            return False
        length, bulk = _HEADER.unpack_from(self._received)
        first = _sizes(bulk, len(self.streams))[0]
        return bool(length > self.largest or len(self._received) >= _HEADER.size + length + first)

    @property
    def awaited(self) -> list[Stream]:
        """The streams to read from: those that still miss a piece of a tensor, or, if none does, the first one."""
        return [stream for stream in self.streams if stream.missing.nbytes] or [self._first]

    def end(self) -> None:
        """Shuts the connections down, as both sides will see; what was sent before still arrives."""
        for stream in self.streams:
            stream.end()

    def close(self) -> None:
        self.end()
        for stream in self.streams:
            stream.connection.close()

    @property
    def _complete(self) -> bool:
        return not any(stream.missing.nbytes for stream in self.streams)

    def _read_what_is_there(self) -> None:
        for stream in self.awaited:
            try:
                self._read(stream, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # another thread has read the bytes, or they are on another stream

    def _read(self, stream: Stream, flags: int = 0) -> None:
        self._read_once(stream, flags)
        while stream.decrypted and (stream is self._first or stream.missing.nbytes):
            self._read_once(stream, flags)

    def _read_once(self, stream: Stream, flags: int) -> None:
        if stream.missing.nbytes:
            stream.fill(flags)  # straight into its place: it may be as large as the model
        else:
            self._received += stream.read(flags)

    def _next(self) -> bytes | None:
        if self._body is None:
            self._begin_message()
        if not self._complete:
            return None
        body, self._body = self._body, None
        return body

    def _begin_message(self) -> None:
        """Takes the next body, if it is complete, and the bytes of its tensor that have come already."""
        if len(self._received) < _HEADER.size:
            return
        length, bulk = _HEADER.unpack_from(self._received)
        room = memoryview(bytearray()) if self.room is None else _bytes(self.room)
        if length > self.largest:
            raise ProtocolError(f"a message of {length} bytes was announced; {self.largest} are allowed")
        any_length, largest = self.any_length or self.makes_room, _LARGEST_ROOM if self.makes_room else room.nbytes
        if bulk > largest or (bulk not in (0, room.nbytes) and not any_length):
            raise ProtocolError("a tensor was announced that is not of the model's size")
        end = _HEADER.size + length
        if len(self._received) < end:
            return
        if self.makes_room:
            self.room = torch.from_numpy(numpy.empty(bulk, numpy.uint8)) if bulk else None  # raises a MemoryError
            room = memoryview(bytearray()) if self.room is None else _bytes(self.room)
        self._body = bytes(self._received[_HEADER.size : end])
        first, *others = self._pieces(room[:bulk])
        here = min(len(self._received) - end, first.nbytes)
        first[:here] = self._received[end : end + here]
        del self._received[: end + here]
        for stream, piece in zip(self.streams, (first[here:], *others), strict=True):
            stream.missing = piece
        self.with_tensor, self.tensor_bytes = bulk > 0, bulk

    def _pieces(self, bulk: memoryview) -> list[memoryview]:
        pieces, begin = [], 0
        for size in _sizes(bulk.nbytes, len(self.streams)):
            pieces.append(bulk[begin : begin + size])
            begin += size
        return pieces


def _sizes(size: int, streams: int) -> list[int]:
    """Returns how many bytes of a tensor go on each stream."""
    if size < streams * LEAST_PIECE:
        return [size] + [0] * (streams - 1)
    each, more = divmod(size, streams)
    return [each + (number < more) for number in range(streams)]


def flush_all(channels: Sequence[Channel]) -> None:
    """Sends the queues of all channels at the same time; returns when the kernel has taken all of them."""
    while unsent := [channel for channel in channels if not channel.flush()]:
        _wait([stream for channel in unsent for stream in channel.streams if stream.unsent], select.POLLOUT)


def _wait(streams: list[Stream], event: int) -> None:
    """Waits until one of the streams is ready for the event, or has ended."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream.connection, event)
    poll.poll()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy().data)
