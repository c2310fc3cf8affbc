"""Small messages between workers and server: length-prefixed JSON over TCP. Tensors travel elsewhere."""

import json
import socket
import struct
from typing import Any

from fairseq_async.errors import ExchangeError

_LENGTH = struct.Struct("!I")
LARGEST = 1 << 24  # bytes; a model's layout is the largest message and needs about 100 bytes a tensor


class Channel:
    """One connection. ``receive`` gives whole messages only; a peer that ends in the middle of one sends nothing."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._received = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        try:
            self.connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ExchangeError(f"the peer closed the connection ({error.strerror})") from error

    def receive(self) -> dict[str, Any]:
        """Blocks for the next message.

        Raises:
            ExchangeError: the peer closed the connection, or sent something that is no message.
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

    def close(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that watches the connection
        except OSError:
            pass  # the peer was faster
        self.connection.close()

    def _read(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except OSError as error:
            raise ExchangeError(f"the peer closed the connection ({error.strerror})") from error
        if not data:
            raise ExchangeError("the peer closed the connection")
        self._received += data

    def _next(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > LARGEST:
            raise ExchangeError(f"a message of {length} bytes was announced; {LARGEST} are allowed")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return _decode(body)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ExchangeError("the peer sent something that is not JSON") from error
    if not isinstance(message, dict):
        raise ExchangeError("the peer sent something that is not a message")
    return message
