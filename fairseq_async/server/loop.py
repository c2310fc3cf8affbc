"""The server's connections: one selector, in the thread that does all the rest."""

import selectors
import socket
import time
from contextlib import closing
from typing import Protocol

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange import Channel
from fairseq_async.server.door import SMALL
from fairseq_async.server.members import Peer
from fairseq_async.server.reception import Reception
from fairseq_async.server.service import Service

_LATE = 20.0  # seconds that a finished server stays for workers that have not come yet
_HANDSHAKE = 10.0  # seconds that a stranger has to prove itself
_STRANGERS = 64  # at one time


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Loop:
    """Brings the service what its peers send.

    Args:
        lifeline: a file whose other end whoever started the server holds open.
    """

    def __init__(self, listener: socket.socket, service: Service, lifeline: HasFileno) -> None:
        self.listener, self.service, self.lifeline = listener, service, lifeline
        self.peers: list[Peer] = []
        self.reception = Reception(service.training)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)
        self._finished_at: float | None = None

    def run(self) -> bool:
        """Returns when the run is finished: True; or when whoever started the server is gone: False."""
        with closing(self.reception):
            while not self._over():
                for key, ready in self._selector.select(timeout=self.service.tick()):
                    if key.fileobj is self.lifeline:
                        return False
                    if key.fileobj is self.listener:
                        self._accept()
                    else:
                        self._serve(key.data, ready)
                    if self._catch_up():
                        break  # connections were read: which of them are ready is to be asked again
                self._close_strangers()
                self._ask_to_write()
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:  # too many open files, or it has gone again
            self.service.refusals.count("connection", "a stranger", error)
            time.sleep(0.05)  # it stays in the queue: no need to spin
            return
        peer = Peer(Channel(connection, SMALL), since=self.service.clock())
        self.peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self.service.greet(peer)

    def _serve(self, peer: Peer, ready: int) -> None:
        self.service.members.hear(peer)  # also who sends or takes a tensor slowly is there
        try:
            if ready & selectors.EVENT_WRITE:
                peer.channel.flush()
            for message in peer.channel.messages() if ready & selectors.EVENT_READ else []:
                self.service.receive(peer, message)
        except ProtocolError as error:
            self.service.refusals.count("no message", peer.name, error)
            self._close(peer)
        except ExchangeError:
            self._close(peer)

    def _catch_up(self) -> bool:
        """Handles what came while a step was taken; False if there was nothing."""
        letters = 0
        for letter in self.reception.letters():
            letters += 1
            self.service.receive(letter.peer, letter.message, letter.accepted)
        return letters > 0

    def _close(self, peer: Peer) -> None:
        self.peers.remove(peer)
        self._selector.unregister(peer.channel.connection)
        self.service.forget(peer)
        peer.channel.close()

    def _close_strangers(self) -> None:
        """Those who take too long to introduce themselves, and the oldest of too many."""
        strangers = [peer for peer in self.peers if peer.worker is None]
        now = self.service.clock()
        for place, peer in enumerate(strangers):
            if now - peer.since > _HANDSHAKE or place < len(strangers) - _STRANGERS:
                self.service.refusals.count("no introduction", peer.name, "closed")
                self._close(peer)

    def _ask_to_write(self) -> None:
        """Who does not take an answer at once is asked again when he can."""
        for peer in self.peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.busy else 0)
            if events != self._selector.get_key(peer.channel.connection).events:
                self._selector.modify(peer.channel.connection, events, peer)

    def _over(self) -> bool:
        if not self.service.finished:
            return False
        now = time.monotonic()
        self._finished_at = self._finished_at or now
        members = self.service.members
        late = len(members.joined) < members.announced and now < self._finished_at + _LATE
        return not late and not any(peer.worker is not None for peer in self.peers)
