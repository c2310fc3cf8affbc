"""One connection of a channel: it sends parts of messages in their order, and receives into given places."""

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from fairseq_async.errors import ExchangeError

_CLOSED = "the peer closed the connection"


class Stream:
    """A connection.

    Attributes:
        missing: the rest of the place into which is received; empty when nothing is expected.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.missing = memoryview(b"")
        self._outgoing: deque[memoryview] = deque()

    def notice_death(self, seconds: float) -> None:
        """Lets the kernel close the connection when a peer's machine has not been heard of for this long."""
        third = max(1, round(seconds / 3))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def queue(self, part: memoryview) -> None:
        """Leaves a part of a message to :meth:`flush`."""
        if part.nbytes:
            self._outgoing.append(part)

    def send(self) -> None:
        """Sends all that was left; returns when it is on its way."""
        with _closed_by_the_peer():
            while self._outgoing:
                self.connection.sendall(self._outgoing.popleft())

    def flush(self) -> bool:
        """Sends what the connection takes without waiting; True when nothing is left."""
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
        """How many parts of messages wait for :meth:`flush`."""
        return len(self._outgoing)

    @property
    def unsent_bytes(self) -> int:
        """What waits for :meth:`flush`, in bytes."""
        return sum(part.nbytes for part in self._outgoing)

    def drop(self) -> None:
        """Forgets what was to be sent."""
        self._outgoing.clear()

    def fill(self, flags: int = 0) -> None:
        """Receives into the place; a BlockingIOError where ``flags`` say not to wait and nothing has come."""
        with _closed_by_the_peer():
            count = self.connection.recv_into(self.missing, 0, flags)
        if not count:
            raise ExchangeError(_CLOSED)
        self.missing = self.missing[count:]

    def read(self, flags: int = 0) -> bytes:
        """Receives up to 64 KiB; a BlockingIOError as of :meth:`fill`."""
        with _closed_by_the_peer():
            data = self.connection.recv(1 << 16, flags)
        if not data:
            raise ExchangeError(_CLOSED)
        return data

    def end(self) -> None:
        """Both sides will find the connection closed; what was sent before still arrives."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes also a thread that watches the connection
        except OSError:
            pass  # the peer was faster


@contextmanager
def _closed_by_the_peer() -> Iterator[None]:
    """An OSError means that; only that it would have to wait is the caller's."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise ExchangeError(f"{_CLOSED} ({error.strerror or error})") from error
