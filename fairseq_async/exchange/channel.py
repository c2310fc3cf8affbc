"""Messages between workers and server over TCP: each a body of bytes, with a flat fp32 tensor behind it or without.

Between machines this is the whole exchange: one connection a worker, so that one port needs to be open, a tunnel can
carry it, and a peer's death is seen by its own connection and by no other.
"""

import socket
import struct
from collections import deque

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange.tls import decrypted

_HEADER = struct.Struct("!IQ")  # bytes of the body, bytes of the tensor behind it
AT_A_TIME = 16  # messages of one peer, before the others have their turn
LARGEST = 1 << 24  # bytes; a model's layout is the largest message and needs about 100 bytes a tensor


class Channel:
    """One connection. ``receive`` gives whole messages only; a peer that ends in the middle of one sends nothing.

    Attributes:
        room: where the tensor behind a message is received; None takes none. It is overwritten as the bytes arrive.
        largest: bytes of a message that the peer may send.
        any_length: the tensor behind a message may be shorter than its room: it is a payload.
        with_tensor: whether the last message had one behind it.
        tensor_bytes: of that tensor.
    """

    def __init__(self, connection: socket.socket, largest: int = LARGEST) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.largest = largest
        self.with_tensor = self.any_length = False
        self.tensor_bytes = 0
        self.room: Tensor | None = None
        self._received = bytearray()
        self._body: bytes | None = None  # of a message whose tensor is on its way
        self._missing = memoryview(b"")
        self._outgoing: deque[memoryview] = deque()

    def notice_death(self, seconds: float) -> None:
        """Lets the kernel close the connection when a peer's machine has not been heard of for this long.

        A peer that ends closes it by itself; one whose machine or network is gone closes nothing.
        """
        third = max(1, round(seconds / 3))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def send(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Sends one message; returns when all of it is on its way."""
        self.queue(body, tensor)
        try:
            while self._outgoing:
                self.connection.sendall(self._outgoing.popleft())
        except OSError as error:
            raise _closed(error) from error

    def queue(self, body: bytes, tensor: Tensor | None = None) -> None:
        """Leaves one message to :meth:`flush`; the tensor must not change before."""
        bulk = memoryview(b"") if tensor is None else _bytes(tensor)
        self._outgoing.append(memoryview(_HEADER.pack(len(body), bulk.nbytes) + body))
        if bulk.nbytes:
            self._outgoing.append(bulk)

    def flush(self) -> bool:
        """Sends what the connection takes without waiting; True when nothing is left."""
        while self._outgoing:
            part = self._outgoing[0]
            try:
                sent = self.connection.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise _closed(error) from error
            self._outgoing.popleft()
            if sent < part.nbytes:
                self._outgoing.appendleft(part[sent:])
        return True

    @property
    def busy(self) -> bool:
        """Whether :meth:`flush` has something left."""
        return bool(self._outgoing)

    @property
    def unsent(self) -> int:
        """How many parts of messages wait for :meth:`flush`."""
        return len(self._outgoing)

    def drop(self) -> None:
        """Ends the connection without what was to be sent."""
        self._outgoing.clear()
        self.end()

    def receive(self) -> bytes:
        """Blocks for the next message.

        Raises:
            ExchangeError: the peer closed the connection, or, a ProtocolError, announced a message that is too large.
        """
        while (message := self._next()) is None:
            self._read()
        return message

    def messages(self) -> list[bytes]:
        """Reads what is there, without waiting, and returns the messages that are complete, :data:`AT_A_TIME` at most.

        One with a tensor behind it comes alone: what is asked before it, or after it, may need the same room.

        Raises:
            ExchangeError: as :meth:`receive`.
        """
        complete: list[bytes] = []
        if not self.has_message:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:  # another thread has read it
                return complete
        while len(complete) < AT_A_TIME and not (complete and self._tensor_is_next):
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
        """Whether a part of a message was read."""
        return bool(self._received)

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read and not taken yet, which no selector will tell."""
        if self._body is not None:
            return not self._missing.nbytes
        if len(self._received) < _HEADER.size:
            return False
        length, bulk = _HEADER.unpack_from(self._received)
        return bool(length > self.largest or len(self._received) >= _HEADER.size + length + bulk)

    def end(self) -> None:
        """Both sides will find the connection closed; what was sent before still arrives."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes also a thread that watches the connection
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self.end()
        self.connection.close()

    def _read(self, flags: int = 0) -> None:
        self._read_once(flags)
        while decrypted(self.connection):
            self._read_once(flags)

    def _read_once(self, flags: int) -> None:
        try:
            if self._missing.nbytes:  # straight into its place: it may be as large as the model
                count = self.connection.recv_into(self._missing, 0, flags)
                self._missing = self._missing[count:]
            else:
                data = self.connection.recv(1 << 16, flags)
                count = len(data)
                self._received += data
        except BlockingIOError:
            raise
        except OSError as error:
            raise _closed(error) from error
        if not count:
            raise ExchangeError("the peer closed the connection")

    def _next(self) -> bytes | None:
        if self._body is None:
            self._begin_message()
        if self._missing.nbytes:
            return None
        body, self._body = self._body, None
        return body

    def _begin_message(self) -> None:
        """Takes the next body, if all of it is there, and what has come of the tensor behind it."""
        if len(self._received) < _HEADER.size:
            return
        length, bulk = _HEADER.unpack_from(self._received)
        room = memoryview(bytearray()) if self.room is None else _bytes(self.room)
        if length > self.largest:
            raise ProtocolError(f"a message of {length} bytes was announced; {self.largest} are allowed")
        if bulk > room.nbytes or (bulk not in (0, room.nbytes) and not self.any_length):
            raise ProtocolError("a tensor was announced that is not of the model's size")
        end = _HEADER.size + length
        if len(self._received) < end:
            return
        self._body = bytes(self._received[_HEADER.size : end])
        here = min(len(self._received) - end, bulk)
        room[:here] = self._received[end : end + here]
        del self._received[: end + here]
        self._missing = room[here:bulk]
        self.with_tensor, self.tensor_bytes = bulk > 0, bulk


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy().data)


def _closed(error: OSError) -> ExchangeError:
    return ExchangeError(f"the peer closed the connection ({error.strerror or error})")
