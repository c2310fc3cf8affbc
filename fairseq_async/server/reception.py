"""Workers are heard while the server is at a step."""

import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile

from fairseq_async.errors import AsyncError, ExchangeError
from fairseq_async.server.members import Peer
from fairseq_async.server.plan import Message
from fairseq_async.server.training import Training


@dataclass(frozen=True)
class Letter:
    """What a peer said meanwhile; one that is ``accepted`` has been answered."""

    peer: Peer
    message: Message
    accepted: bool


class Reception:
    """Reads the connections in a thread of its own while the server's thread takes a step.

    An update that comes then, and behind that step will only be added to others, is answered at once: its sender goes
    on. All that was said is left, in its order, to the server's thread; nothing is changed here.

    Args:
        training: opens the reception where it takes an update in.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        training.meanwhile = self.open
        self._letters: deque[Letter] = deque()
        self._room, self._version = 0, 0  # how many more may be accepted, and the version after the step
        self._lock = threading.Lock()  # of the connections in the selector
        # The thread waits for this selector all the time: to wake it for every step would hold the step up.
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._rope.close()

    def letters(self) -> Iterator[Letter]:
        """What was heard; while it is read, no more is."""
        while self._letters:
            yield self._letters[0]
            self._letters.popleft()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Listens within this, if the update in hand takes a step and not every update does."""
        self._room = 0 if self._letters else self._rooms()
        if self._room:
            self._version = self.training.job.server.version + 1
            self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            for peer in self.training.members.peers.values():
                if peer.admitted and not peer.remote and peer.waiting is None:
                    self._selector.register(peer.channel.connection, selectors.EVENT_READ, peer)

    def _end(self) -> None:
        with self._lock:
            for key in [key for key in self._selector.get_map().values() if key.data is not None]:
                self._selector.unregister(key.fileobj)

    def _rooms(self) -> int:
        """How many updates behind the one in hand, which takes a step, will only be added to others."""
        job, workers = self.training.job, len(self.training.members.peers)
        server = job.server
        ends = server.last_version is not None and server.version + 1 >= server.last_version
        if ends or not job.terms.publishes or not server.changes():
            return 0
        return len(list(takewhile(lambda ahead: not server.changes(ahead), range(1, workers))))

    def _listen(self) -> None:
        with self._bell, self._selector:
            while True:
                self._selector.select()
                with self._lock:  # the step may be over by now, and connections be the loop's again
                    for key, _ in self._selector.select(timeout=0):
                        if key.data is None:
                            return
                        self._selector.unregister(key.fileobj)  # who waits for an answer says no more
                        self._hear(key.data)

    def _hear(self, peer: Peer) -> None:
        try:
            messages = peer.channel.messages()
        except ExchangeError:
            peer.channel.end()  # which the loop will find, and close it
            return
        self._letters.extend(Letter(peer, message, self._accepts(peer, message)) for message in messages)

    def _accepts(self, peer: Peer, message: Message) -> bool:
        """Answers an update for which there is room. Whatever is not as usual is left to the server's thread."""
        if not self._room or message.get("kind") != "push" or message.get("wait"):
            return False
        try:
            answer = self.training.acceptance(self.training.update(peer, message), self._version)
        except Exception:  # whatever it is, the server's thread will meet it too, and say so
            return False
        self._room -= 1
        peer.channel.queue(answer)
        with suppress(AsyncError):  # its connection will say so
            peer.channel.flush()
        return True
