"""Reads the workers' messages while the server's main thread applies an update."""

import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile

from fairseq_async.errors import AsyncError, ExchangeError
from fairseq_async.protocol import Push, encode, parse_request
from fairseq_async.server.network.peers import Peer
from fairseq_async.server.service import Service


@dataclass(frozen=True)
class Received:
    """A message that came during a step; ``accepted`` is its update if that was answered already."""

    peer: Peer
    body: bytes
    accepted: Push | None


class BackgroundReader:
    """Reads the connections in a thread of its own while the main thread takes a step.

    An update that comes during the step, and will only be added to others after it, is answered at once: its sender
    goes on. All messages are left, in their order, to the main thread.

    Hazard: two threads use the connections. The selector here decides which one may: a connection is registered only
    while the main thread is inside :meth:`reading`, and then the main thread uses none. The thread here changes nothing
    of the run; for an answer it reads the plan, which the main thread does not touch during a step.

    Args:
        service: it enters :meth:`reading` while it applies an update.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        service.applying = self.reading
        self._received: deque[Received] = deque()
        self._acceptable, self._version = 0, 0  # how many more updates may be accepted; the version after the step
        self._lock = threading.Lock()  # of the connections in the selector
        # The thread waits on this selector all the time: waking it for every step would hold the step up.
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop_writer.close()

    def received(self) -> Iterator[Received]:
        """Yields the messages that came during the step; while they are handled, no more are read."""
        while self._received:
            yield self._received[0]
            self._received.popleft()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Lets the thread read inside this context, if the present update takes a step and the next one would not."""
        self._acceptable = 0 if self._received else self._count_acceptable()
        if self._acceptable:
            self._version = self.service.described.coordinator.server.version + 1
            self._register()
        try:
            yield
        finally:
            self._unregister()

    def _register(self) -> None:
        with self._lock:
            for worker, peer in self.service.peers.items():
                if (
                    peer.admitted
                    and peer.channel.room is None
                    and self.service.membership.members[worker].pending is None
                ):
                    self._selector.register(peer.channel.connection, selectors.EVENT_READ, peer)

    def _unregister(self) -> None:
        with self._lock:
            for key in [key for key in self._selector.get_map().values() if key.data is not None]:
                self._selector.unregister(key.fileobj)

    def _count_acceptable(self) -> int:
        """Returns how many updates after the present one, which takes a step, will only be added to others."""
        run, workers = self.service.described, len(self.service.peers)
        server = run.coordinator.server
        ends = server.last_version is not None and server.version + 1 >= server.last_version
        if ends or not run.spec.publishes or not server.moves_parameters():
            return 0
        return len(list(takewhile(lambda ahead: not server.moves_parameters(ahead), range(1, workers))))

    def _read(self) -> None:
        with self._stop_reader, self._selector:
            while True:
                self._selector.select()
                with self._lock:  # by now the step may be over, and the connections belong to the main thread again
                    for key, _ in self._selector.select(timeout=0):
                        if key.data is None:
                            return
                        self._selector.unregister(key.fileobj)  # a worker that waits for an answer sends nothing
                        self._receive(key.data)

    def _receive(self, peer: Peer) -> None:
        try:
            bodies = peer.channel.messages(most=1)  # the messages behind it get their turns from the main thread
        except (ExchangeError, MemoryError):
            peer.channel.end()  # the main thread will find that, and close it
            return
        self._received.extend(Received(peer, body, self._accept(peer, body)) for body in bodies)

    def _accept(self, peer: Peer, body: bytes) -> Push | None:
        """Answers an update that can be accepted, and returns it. All else is left to the main thread."""
        if not self._acceptable:
            return None
        run = self.service.described
        try:
            push = parse_request(body)
            if not isinstance(push, Push) or push.wait:
                return None
            update = run.checked_update(peer.id, push)
            answer = run.reply(run.coordinator.accept(update, self._version, self.service.clock()))
        except Exception:  # whatever it is, the main thread will meet it too, and report it
            return None
        self._acceptable -= 1
        peer.channel.queue(encode(answer))
        with suppress(AsyncError):  # the main thread will find that the connection is closed
            peer.channel.flush()
        return push
