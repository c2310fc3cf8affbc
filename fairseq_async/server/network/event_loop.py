"""The server's main loop: one selector over all connections, in the thread that does all other work too."""

import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.channel import AT_A_TIME
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.background_reader import BackgroundReader
from fairseq_async.server.network.peers import SMALL, Peer
from fairseq_async.server.network.turns import Turns
from fairseq_async.server.service import Service

_LATE_SECONDS = 20.0  # that a finished server stays for workers that have not come yet
_OWNER_SECONDS = 60.0  # that it stays for a worker 0 that has died and is started again: it writes the last checkpoint
_HANDSHAKE_SECONDS = 10.0  # that a stranger has to prove itself
_MOST_STRANGERS = 256  # unidentified peers of one address, at one time
_MOST_IN_ALL = 512  # unidentified peers of all addresses
_TURN_SECONDS = 0.05  # of turns, after which the sockets are looked at again: more may have come


def _is_over(began: float) -> bool:
    """Whether a turn that began at this time has taken long enough."""
    return time.perf_counter() - began > _TURN_SECONDS


class HasFileno(Protocol):
    """A file or socket, which a selector can watch."""

    def fileno(self) -> int: ...


class EventLoop:
    """Accepts connections, and passes the messages of peers to the service.

    Args:
        lifeline: a file whose other end the process that started the server holds open.
        ends_with_workers: end also an unfinished run, when no worker is there, or is awaited, any more.
        encryption: the TLS context for every connection; None for no encryption.
    """

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        lifeline: HasFileno,
        ends_with_workers: bool = False,
        encryption: ssl.SSLContext | None = None,
    ) -> None:
        self.listener, self.service, self.lifeline = listener, service, lifeline
        self.ends_with_workers, self.encryption = ends_with_workers, encryption
        self.peers: list[Peer] = []
        self.reader = BackgroundReader(service)
        self._turns = Turns()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)
        if service.bell is not None:
            self._selector.register(service.bell, selectors.EVENT_READ)  # it only makes the loop tick
        self._finished_at: float | None = None

    def run(self) -> bool:
        """Serves until the run is over (returns True), or the process that started the server is gone (False)."""
        wait, read_at = 0.0, self.service.clock()
        with closing(self.reader):
            while not self._over():
                selected = self._selector.select(timeout=wait)
                read_at = self._excuse_silence(read_at, wait)
                if any(key.fileobj is self.lifeline for key, _ in selected):
                    if not self.service.busy:
                        return False
                    self._selector.unregister(self.lifeline)  # the run is finished: the service does what is left
                if any(key.fileobj is self.listener for key, _ in selected):
                    self._accept()
                self._serve_all([(key.data, events) for key, events in selected if key.data is not None])
                self._close_strangers()
                # Only after the messages were read: they may be from workers that seem silent.
                wait = self.service.tick()
                self._watch()
                if any(peer.has_turn for peer in self.peers):
                    wait = 0.0
        return True

    def _serve_all(self, ready: Sequence[tuple[Peer, int]]) -> None:
        """Serves in turn the peers whose sockets are ready, and those with messages that were read and not handled."""
        left = [(peer, selectors.EVENT_READ) for peer in self.peers if peer.has_turn]
        turns: dict[Peer, int] = {}
        for peer, events in [*left, *ready]:
            turns[peer] = turns.get(peer, 0) | events
        for peer in turns:  # at once, also for later turns: a peer that sends or takes a tensor slowly is alive
            self.service.note_message(peer)
        for peer in self._turns.in_order(turns):
            if peer not in self.peers:
                continue  # it was closed together with another connection of its worker
            began = time.perf_counter()
            with self._turn_of(peer):
                self._serve(peer, turns[peer])
            if peer.stream_of is not None and peer in self.peers:
                self.peers.remove(peer)  # its connection belongs to that peer now
            if self._handle_background() or _is_over(began):
                return  # other connections may be ready now: look again

    def _excuse_silence(self, read_at: float, wait: float) -> float:
        """Excuses the workers' silence while this process was suspended or stopped: it has not read its sockets since
        ``read_at``, much longer than the ``wait`` that it meant. Returns the time."""
        membership, now = self.service.membership, self.service.clock()
        if now - read_at - wait > membership.timeout / 2:
            membership.excuse(now - read_at)
            if self._finished_at is not None:
                self._finished_at += now - read_at
        return now

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self.listener.accept()
            if self.encryption is not None:
                connection = tls.accepted(self.encryption, connection)
        except (OSError, MemoryError) as error:  # too many open files, or the peer has gone again
            self.service.refusals.count("connection", "a stranger", error)
            time.sleep(0.05)  # the connection stays in the queue: do not spin
            return
        peer = Peer(Channel(connection, SMALL), since=self.service.clock(), address=address)
        self.peers.append(peer)
        self._turns.greet(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if self.encryption is None:
            self.service.greet(peer)

    def _secure(self, peer: Peer) -> None:
        """Goes on with the TLS handshake. Nothing is read from a peer before it has shown a certificate of ours."""
        try:
            peer.secured = tls.handshake(peer.channel.connection)
        except (ssl.SSLEOFError, ConnectionError):  # it has gone again
            self._close(peer)
        except OSError as error:
            self.service.refusals.count("TLS", peer.name, tls.in_words(error))
            self._close(peer)
        else:
            if peer.secured:
                self.service.greet(peer)

    def _serve(self, peer: Peer, ready: int) -> None:
        if self.encryption is not None and not peer.secured:
            return self._secure(peer)
        if ready & selectors.EVENT_WRITE:
            peer.channel.flush()
        if ready & selectors.EVENT_READ:
            self._handle_messages(peer)

    def _handle_messages(self, peer: Peer) -> None:
        """Handles a peer's messages until it is the others' turn, or the peer must take its answers first."""
        began = time.perf_counter()
        at_once = AT_A_TIME if peer.worker is None else 1  # those behind an introduction are judged with it
        for number in range(AT_A_TIME):
            if peer.channel.is_full or (number and (_is_over(began) or not peer.channel.has_message)):
                return
            for body in peer.channel.messages(at_once):
                if peer.stream_of is not None:
                    raise ProtocolError("a message on a connection for pieces of tensors")
                self.service.receive(peer, body)

    @contextmanager
    def _turn_of(self, peer: Peer) -> Iterator[None]:
        """Charges a peer for its turn. An error in it ends this worker's connections, and no others."""
        began, stranger = time.perf_counter(), peer.worker is None
        try:
            yield
        except (ProtocolError, MemoryError) as error:  # the peer sends no message, or more than there is room for
            self.service.refusals.count("no message", peer.name, str(error) or "no memory for what it sends")
            self._close(peer)
        except ExchangeError:
            self._close(peer)
        self._turns.charge(peer, time.perf_counter() - began)
        if stranger and peer.worker is not None:
            self._turns.admit(peer)

    def _handle_background(self) -> bool:
        """Handles the messages that came during a step; returns whether there were any."""
        received = 0
        for each in self.reader.received():
            received += 1
            with self._turn_of(each.peer):
                if each.accepted is not None:
                    self.service.handle(each.peer, each.accepted, accepted=True)
                else:
                    self.service.receive(each.peer, each.body)
        return received > 0

    def _close(self, peer: Peer) -> None:
        """Closes all connections of a peer's worker together."""
        main = peer.stream_of or peer
        self.peers = [each for each in self.peers if each not in (peer, main)]
        for stream in main.channel.streams:
            if stream.connection.fileno() in self._selector.get_map():
                self._selector.unregister(stream.connection)
        self.service.disconnected(main)
        main.channel.close()

    def _close_strangers(self) -> None:
        """Closes peers that take too long to introduce themselves, and one if there are too many of one address."""
        strangers = [peer for peer in self.peers if peer.worker is None]
        now = self.service.clock()
        superfluous = [peer for peer in strangers if now - peer.since > _HANDSHAKE_SECONDS]
        counts = Counter(peer.address for peer in strangers)
        address, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > _MOST_STRANGERS or len(strangers) > _MOST_IN_ALL:
            of_address = [peer for peer in strangers if peer.address == address]
            # A worker far away takes a while to answer: peers that have begun to, and the youngest, stay.
            superfluous.append(min(of_address, key=lambda peer: (peer.has_begun, peer.since)))
        for peer in superfluous:
            if peer in self.peers:
                self.service.refusals.count("no introduction", peer.name, "closed")
                self._close(peer)

    def _watch(self) -> None:
        """Watches for messages of each peer, and for when a peer that did not take an answer at once can take it."""
        for peer in self.peers:
            awaited = [] if peer.channel.is_full else peer.channel.awaited
            for stream in peer.channel.streams:
                reads = selectors.EVENT_READ if stream in awaited else 0
                self._select(peer, stream.connection, reads | (selectors.EVENT_WRITE if stream.unsent else 0))

    def _select(self, peer: Peer, connection: socket.socket, events: int) -> None:
        known = self._selector.get_map().get(connection.fileno())  # by number: a look-up by the socket is slow
        if known is None and events:
            self._selector.register(connection, events, peer)
        elif known is not None and not events:
            self._selector.unregister(connection)
        elif known is not None and (known.events, known.data) != (events, peer):
            self._selector.modify(connection, events, peer)

    def _over(self) -> bool:
        now = self.service.clock()
        if self.service.busy:
            return False
        if not self.service.finished:
            return self.ends_with_workers and self.service.membership.all_have_gone(now)
        self._finished_at = self._finished_at or now
        membership = self.service.membership
        if self._waits_for_late(membership, now - self._finished_at):
            return False
        there = {peer.worker for peer in self.peers if peer.worker is not None} - membership.unready
        silent = there & membership.silent(now)
        # A worker that has sent no update can lose none any more: the usual timeout applies to it here.
        hanging = {w for w in there - silent if membership.hangs(w, now, since=self._finished_at, untried=0.0)}
        if there - silent - hanging:
            return False
        for worker in sorted(silent):
            self.service.tell(f"worker {worker} was not heard of for {membership.timeout:g} s: the run ends without it")
        for worker in sorted(hanging):
            seconds = now - max(self._finished_at, membership.members[worker].turn)
            self.service.tell(f"worker {worker} has asked for nothing for {seconds:.0f} s: the run ends without it")
        return True

    def _waits_for_late(self, membership: Membership, seconds: float) -> bool:
        """Whether a run, finished for so many seconds, stays open for workers that are still to come."""
        owner_comes = membership.is_away(0) or 0 in membership.unready
        others_come = membership.unready or len(membership.joined) < membership.announced
        return seconds < (_OWNER_SECONDS if owner_comes else _LATE_SECONDS if others_come else 0.0)
