"""One connection of a channel: it sends parts of messages in their order, and receives into given places."""

import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from fairseq_async.errors import ExchangeError

_CLOSED = "the peer closed the connection"
_LONGEST, LONGEST_MS = 32_767, 2**31 - 1  # seconds and milliseconds that Linux takes


class Stream:
    """One TCP connection, or pair of local sockets, with a queue of parts of messages to send.

    Attributes:
        missing: the rest of the memory that is being received into; empty when nothing is expected.
    """

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.missing = memoryview(b"")
        self._outgoing: deque[memoryview] = deque()

    def notice_death(self, seconds: float) -> None:
        """Lets the kernel close the connection when the peer's machine has been silent for this long."""
        third = min(max(1, round(seconds / 3)), _LONGEST)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(1000 * seconds), LONGEST_MS))

    def queue(self, part: memoryview) -> None:
        """Queues a part of a message for :meth:`flush` or :meth:`send`."""
        if part.nbytes:
            self._outgoing.append(part)

    def hold_back(self) -> memoryview:
        """Takes the last byte out of the queue: until it is queued again, the peer waits for the end of the message."""
        last = self._outgoing.pop()
        self.queue(last[:-1])
        return last[-1:]

    def send(self) -> None:
        """Sends the whole queue; returns when the kernel has taken all of it."""
        with _closed_by_the_peer():
            while self._outgoing:
                self.connection.sendall(self._outgoing.popleft())

    def flush(self) -> bool:
        """Sends as much of the queue as the connection takes without waiting; True when nothing is left."""
        while self._outgoing:
            part = self._outgoing[0]
            try:
                with _closed_by_the_peer():
                    sent = self.connection.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._outgoing.popleft()
            if sent < part.nbytes:
                self._outgoing.appendleft(part[sent:])
        return True

    @property
    def unsent(self) -> int:
        """Number of parts of messages that wait for :meth:`flush`."""
        return len(self._outgoing)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that wait for :meth:`flush`."""
        return sum(part.nbytes for part in self._outgoing)

    def drop(self) -> None:
        """Drops the queue."""
        self._outgoing.clear()

    def fill(self, flags: int = 0) -> None:
        """Receives into ``missing``; raises a BlockingIOError where ``flags`` forbid waiting and nothing has come."""
        with _closed_by_the_peer():
            count = self.connection.recv_into(self.missing, 0, flags)
        if not count:
            raise ExchangeError(_CLOSED)
        self.missing = self.missing[count:]

    def read(self, flags: int = 0) -> bytes:
        """Receives up to 64 KiB; raises a BlockingIOError as :meth:`fill` does."""
        with _closed_by_the_peer():
            data = self.connection.recv(1 << 16, flags)
        if not data:
            raise ExchangeError(_CLOSED)
        return data

    @property
    def decrypted(self) -> int:
        """Number of bytes that were received and decrypted but not read yet, of which no selector tells."""
        return self.connection.pending() if isinstance(self.connection, ssl.SSLSocket) else 0

    def end(self) -> None:
        """Shuts the connection down, as both sides will see; what was sent before still arrives."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # also wakes a thread that watches the connection
        except OSError:
            pass  # the peer has closed it already


@contextmanager
def _closed_by_the_peer() -> Iterator[None]:
    """Turns an OSError into an ExchangeError, except a BlockingIOError, which the caller handles."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise ExchangeError(f"{_CLOSED} ({error.strerror or error})") from error
