"""Messages between workers and server over TCP: length-prefixed JSON, with a flat fp32 tensor behind it or without.

Between machines this is the whole exchange: one connection a worker, so that one port needs to be open, a tunnel can
carry it, and a peer's death is seen by its own connection and by no other.
"""

import json
import socket
import struct
from collections import deque
from typing import Any

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError, ProtocolError

_LENGTH = struct.Struct("!I")
LARGEST = 1 << 24  # bytes; a model's layout is the largest message and needs about 100 bytes a tensor
_PAYLOAD = "payload"  # the key that announces how many bytes follow


class Channel:
    """One connection. ``receive`` gives whole messages only; a peer that ends in the middle of one sends nothing.

    Attributes:
        room: where the tensor behind a message is received; None takes none. It is overwritten as the bytes arrive.
        largest: bytes of a message that the peer may send.
    """

    def __init__(self, connection: socket.socket, largest: int = LARGEST) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.largest = largest
        self.room: Tensor | None = None
        self._received = bytearray()
        self._announcing: dict[str, Any] | None = None  # a message whose tensor is on its way
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

    def send(self, message: dict[str, Any], tensor: Tensor | None = None) -> None:
        """Returns when all of it is on its way."""
        self.queue(message, tensor)
        try:
            while self._outgoing:
                self.connection.sendall(self._outgoing.popleft())
        except OSError as error:
            raise _closed(error) from error

    def queue(self, message: dict[str, Any], tensor: Tensor | None = None) -> None:
        """Leaves it to :meth:`flush`; the tensor must not change before."""
        bulk = memoryview(b"") if tensor is None else _bytes(tensor)
        if tensor is not None:
            message = message | {_PAYLOAD: bulk.nbytes}
        body = json.dumps(message).encode()
        self._outgoing.append(memoryview(_LENGTH.pack(len(body)) + body))
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

    def receive(self) -> dict[str, Any]:
        """Blocks for the next message.

        Raises:
            ExchangeError: the peer closed the connection, or, a ProtocolError, sent something that is no message.
        """
        while (message := self._next()) is None:
            self._read()
        return message

    def messages(self) -> list[dict[str, Any]]:
        """Reads once, then returns every message that is complete."""
        self._read()
        complete = []
        while (message := self._next()) is not None:
            complete.append(message)
        return complete

    def end(self) -> None:
        """Both sides will find the connection closed; what was sent before still arrives."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes also a thread that watches the connection
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self.end()
        self.connection.close()

    def _read(self) -> None:
        try:
            if self._missing.nbytes:  # straight into its place: it may be as large as the model
                count = self.connection.recv_into(self._missing)
                self._missing = self._missing[count:]
            else:
                data = self.connection.recv(1 << 16)
                count = len(data)
                self._received += data
        except OSError as error:
            raise _closed(error) from error
        if not count:
            raise ExchangeError("the peer closed the connection")

    def _next(self) -> dict[str, Any] | None:
        if self._announcing is None:
            message = self._next_json()
            if message is None or _PAYLOAD not in message:
                return message
            self._begin_tensor(message)
        if self._missing.nbytes:
            return None
        message, self._announcing = self._announcing, None
        return message

    def _next_json(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.largest:
            raise ProtocolError(f"a message of {length} bytes was announced; {self.largest} are allowed")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return _decode(body)

    def _begin_tensor(self, message: dict[str, Any]) -> None:
        room = memoryview(b"") if self.room is None else _bytes(self.room)
        if message.pop(_PAYLOAD) != room.nbytes:
            raise ProtocolError("a tensor was announced that is not of the model's size")
        here = min(len(self._received), room.nbytes)
        room[:here] = self._received[:here]
        del self._received[:here]
        self._announcing, self._missing = message, room[here:]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy().data)


def _closed(error: OSError) -> ExchangeError:
    return ExchangeError(f"the peer closed the connection ({error.strerror})")


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the peer sent something that is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("the peer sent something that is not a message")
    return message
