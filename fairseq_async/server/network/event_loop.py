"""The server's main loop: one selector over all connections, in the thread that does all the rest."""

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

_LATE_SECONDS = 20.0  # for which a finished server stays for workers that have not come yet
_OWNER_SECONDS = 60.0  # and for a worker 0 that has died and is started again: it has the last checkpoint to write
_HANDSHAKE_SECONDS = 10.0  # that a stranger has to prove itself
_MOST_STRANGERS = 256  # of one address, at one time
_MOST_IN_ALL = 512
_TURN_SECONDS = 0.05  # after which it is asked again whose turn it is: something may have come meanwhile


def _is_over(began: float) -> bool:
    """Whether a turn that has begun then has taken long enough."""
    return time.perf_counter() - began > _TURN_SECONDS


class HasFileno(Protocol):
    """A file or socket."""

    def fileno(self) -> int: ...


class EventLoop:
    """Accepts connections, and brings the service what its peers send.

    Args:
        lifeline: a file whose other end whoever started the server holds open.
        ends_with_workers: end also a run that is not finished, when nobody is there, or is awaited, any more.
        encryption: of every connection; None for none.
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
            self._selector.register(service.bell, selectors.EVENT_READ)  # there is nothing to do but to tick
        self._finished_at: float | None = None

    def run(self) -> bool:
        """Returns when the run is over: True; or when whoever started the server is gone: False."""
        wait, read_at = 0.0, self.service.clock()
        with closing(self.reader):
            while not self._over():
                selected = self._selector.select(timeout=wait)
                read_at = self._excuse_silence(read_at, wait)
                if any(key.fileobj is self.lifeline for key, _ in selected):
                    if not self.service.busy:
                        return False
                    self._selector.unregister(self.lifeline)  # the run is finished: what is left is done first
                if any(key.fileobj is self.listener for key, _ in selected):
                    self._accept()
                self._serve_all([(key.data, events) for key, events in selected if key.data is not None])
                self._close_strangers()
                # After what has come was read: it may be of those who seem to be silent.
                wait = self.service.tick()
                self._watch()
                if any(peer.has_turn for peer in self.peers):
                    wait = 0.0
        return True

    def _serve_all(self, ready: Sequence[tuple[Peer, int]]) -> None:
        """Each peer has its turn: those whose sockets are ready, and those of whom more was read than was handled."""
        left = [(peer, selectors.EVENT_READ) for peer in self.peers if peer.has_turn]
        turns: dict[Peer, int] = {}
        for peer, events in [*left, *ready]:
            turns[peer] = turns.get(peer, 0) | events
        for peer in turns:  # those too whose turn comes later: also who sends or takes a tensor slowly is there
            self.service.hear(peer)
        for peer in self._turns.in_order(turns):
            if peer not in self.peers:
                continue  # it was closed with another one of its connections
            began = time.perf_counter()
            with self._turn_of(peer):
                self._serve(peer, turns[peer])
            if peer.stream_of is not None and peer in self.peers:
                self.peers.remove(peer)  # its connection is another peer's now
            if self._handle_background() or _is_over(began):
                return  # connections were read, or more has come: which of them are ready is to be asked again

    def _excuse_silence(self, read_at: float, wait: float) -> float:
        """Who was suspended, or stopped, has not looked at its sockets since ``read_at``, for longer than it meant to
        wait. Returns the time."""
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
        except (OSError, MemoryError) as error:  # too many open files, or it has gone again
            self.service.refusals.count("connection", "a stranger", error)
            time.sleep(0.05)  # it stays in the queue: no need to spin
            return
        peer = Peer(Channel(connection, SMALL), since=self.service.clock(), address=address)
        self.peers.append(peer)
        self._turns.greet(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if self.encryption is None:
            self.service.greet(peer)

    def _secure(self, peer: Peer) -> None:
        """Goes on with the handshake of TLS. Nothing is read of a peer before it has shown a certificate of ours."""
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
        """Until the others have their turn, or the peer has to take answers first."""
        began = time.perf_counter()
        at_once = AT_A_TIME if peer.worker is None else 1  # what comes behind an introduction is judged with it
        for number in range(AT_A_TIME):
            if peer.channel.is_full or (number and (_is_over(began) or not peer.channel.has_message)):
                return
            for body in peer.channel.messages(at_once):
                if peer.stream_of is not None:
                    raise ProtocolError("a message on a connection for pieces of tensors")
                self.service.receive(peer, body)

    @contextmanager
    def _turn_of(self, peer: Peer) -> Iterator[None]:
        """The peer is served. What goes wrong ends this connection, and no other."""
        began, stranger = time.perf_counter(), peer.worker is None
        try:
            yield
        except (ProtocolError, MemoryError) as error:  # what it sends is no message, or more than there is room for
            self.service.refusals.count("no message", peer.name, str(error) or "no memory for what it sends")
            self._close(peer)
        except ExchangeError:
            self._close(peer)
        self._turns.charge(peer, time.perf_counter() - began)
        if stranger and peer.worker is not None:
            self._turns.admit(peer)

    def _handle_background(self) -> bool:
        """Handles what came while a step was taken; False if there was nothing."""
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
        """Closes all connections of a worker together."""
        main = peer.stream_of or peer
        self.peers = [each for each in self.peers if each not in (peer, main)]
        for stream in main.channel.streams:
            if stream.connection.fileno() in self._selector.get_map():
                self._selector.unregister(stream.connection)
        self.service.disconnected(main)
        main.channel.close()

    def _close_strangers(self) -> None:
        """Closes those that take too long to introduce themselves, and some of too many from one address."""
        strangers = [peer for peer in self.peers if peer.worker is None]
        now = self.service.clock()
        superfluous = [peer for peer in strangers if now - peer.since > _HANDSHAKE_SECONDS]
        counts = Counter(peer.address for peer in strangers)
        address, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > _MOST_STRANGERS or len(strangers) > _MOST_IN_ALL:
            of_address = [peer for peer in strangers if peer.address == address]
            # A worker far away takes a while to answer: those that have begun to, and the youngest, stay.
            superfluous.append(min(of_address, key=lambda peer: (peer.has_begun, peer.since)))
        for peer in superfluous:
            if peer in self.peers:
                self.service.refusals.count("no introduction", peer.name, "closed")
                self._close(peer)

    def _watch(self) -> None:
        """Watches for what each peer is to send, and for when one that does not take an answer at once can take it."""
        for peer in self.peers:
            awaited = [] if peer.channel.is_full else peer.channel.awaited
            for stream in peer.channel.streams:
                reads = selectors.EVENT_READ if stream in awaited else 0
                self._select(peer, stream.connection, reads | (selectors.EVENT_WRITE if stream.unsent else 0))

    def _select(self, peer: Peer, connection: socket.socket, events: int) -> None:
        known = self._selector.get_map().get(connection.fileno())  # by its number: to look for a socket itself is slow
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
            return self.ends_with_workers and not self.service.membership.expected(now)
        self._finished_at = self._finished_at or now
        membership = self.service.membership
        if self._waits_for_late(membership, now - self._finished_at):
            return False
        there = {peer.worker for peer in self.peers if peer.worker is not None} - membership.unready
        silent = there & membership.silent(now)
        # A worker that has sent no update has none to lose any more: it has the usual timeout here.
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
        """Whether a run that is finished since so many seconds stays open for workers that are still to come."""
        owner_comes = membership.is_away(0) or 0 in membership.unready
        others_come = membership.unready or len(membership.joined) < membership.announced
        return seconds < (_OWNER_SECONDS if owner_comes else _LATE_SECONDS if others_come else 0.0)
