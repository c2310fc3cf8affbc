"""Messages between workers and server over TCP: each is a body of bytes, optionally with a flat fp32 tensor behind it.

Between machines all of the exchange goes over TCP, with one connection per worker, so that only one port needs to be
open, a tunnel can carry it, and a peer's death shows on its own connection alone.
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
_LARGEST_ROOM = 1 << 46  # bytes of new memory for one tensor: less than that raises no error but a MemoryError
_BETWEEN = 1 << 16  # bytes of messages that may wait in addition to one tensor


class Channel:
    """The connection to one peer, for whole messages: a message that the peer breaks off in the middle is dropped.

    Attributes:
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
        self._stream = Stream(connection)
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
        """Whether the connection has this event of ``select.poll`` within the time, or is closed."""
        if self.connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.connection, event)
        return bool(poll.poll(min(1000 * seconds, LONGEST_MS)))

    def notice_death(self, seconds: float) -> None:
        """Lets the kernel close the connection when the peer's machine has been silent for this long.

        A process that ends closes its connections itself; a machine or network that fails does not.
        """
        self._stream.notice_death(seconds)

    def send(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Sends one message; returns when the kernel has taken all of it."""
        self.queue(body, tensor)
        self._stream.send()

    def hold_back(self) -> Callable[[], None]:
        """Lets the peer wait for the end of the message that was queued last; returns what queues that end."""
        end = self._stream.hold_back()
        return lambda: self._stream.queue(end)

    def queue(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Queues one message for :meth:`flush`; a tensor in memory must not change before it is sent."""
        bulk = memoryview(b"") if tensor is None else _bytes(tensor)
        self._largest_sent = max(self._largest_sent, bulk.nbytes)
        self._stream.queue(memoryview(_HEADER.pack(len(body), bulk.nbytes) + body))
        self._stream.queue(bulk)

    def flush(self) -> bool:
        """Sends as much of the queue as the connection takes without waiting; True when nothing is left."""
        return self._stream.flush()

    @property
    def unsent(self) -> int:
        """Number of parts of messages that wait for :meth:`flush`."""
        return self._stream.unsent

    @property
    def is_full(self) -> bool:
        """Whether more than one tensor waits for :meth:`flush`; each of them may have memory of its own."""
        return self._stream.unsent_bytes > self._largest_sent + _BETWEEN

    def drop(self) -> None:
        """Ends the connection, and drops the messages that were not sent yet."""
        self._stream.drop()
        self.end()

    def receive(self) -> bytes:
        """Waits for the next message, and returns its body.

        Raises:
            ExchangeError: the peer closed the connection; as a ProtocolError: it announced a message or tensor whose
                size is not allowed.
        """
        while (message := self._next()) is None:
            others = [other for other in self.companions if not other._is_whole]
            if not others:
                self._read()
                continue
            _wait([self, *others], select.POLLIN)
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
        """Whether a message was read and not returned yet, of which no selector tells."""
        if self._body is not None:
            return self._complete
        if len(self._received) < _HEADER.size:
            return False
        length, bulk = _HEADER.unpack_from(self._received)
        return bool(length > self.largest or len(self._received) >= _HEADER.size + length + bulk)

    def end(self) -> None:
        """Shuts the connection down, as both sides will see; what was sent before still arrives."""
        self._stream.end()

    def close(self) -> None:
        self.end()
        self.connection.close()

    @property
    def _complete(self) -> bool:
        return not self._stream.missing.nbytes

    def _read_what_is_there(self) -> None:
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # another thread has read the bytes

    def _read(self, flags: int = 0) -> None:
        self._read_once(flags)
        while self._stream.decrypted:
            self._read_once(flags)

    def _read_once(self, flags: int) -> None:
        if self._stream.missing.nbytes:
            self._stream.fill(flags)  # straight into its place: it may be as large as the model
        else:
            self._received += self._stream.read(flags)

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
        here = min(len(self._received) - end, bulk)
        room[:here] = self._received[end : end + here]
        del self._received[: end + here]
        self._stream.missing = room[here:bulk]
        self.with_tensor, self.tensor_bytes = bulk > 0, bulk


def flush_all(channels: Sequence[Channel]) -> None:
    """Sends the queues of all channels at the same time; returns when the kernel has taken all of them."""
    while unsent := [channel for channel in channels if not channel.flush()]:
        _wait(unsent, select.POLLOUT)


def _wait(channels: Sequence[Channel], event: int) -> None:
    """Waits until one of the channels is ready for the event, or has ended."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel.connection, event)
    poll.poll()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().view(torch.uint8).numpy().data)
