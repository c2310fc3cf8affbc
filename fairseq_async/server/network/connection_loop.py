"""A loop over the connections of a process that listens: it accepts peers, and serves them in turn."""

import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from fairseq_async.errors import ExchangeError, ProtocolError
from fairseq_async.exchange import Channel, tls
from fairseq_async.exchange.channel import AT_A_TIME
from fairseq_async.server.network.connections import SMALL, Peer, RefusalLog

_HANDSHAKE_SECONDS = 10.0  # that a stranger has to prove itself
_MOST_STRANGERS = 256  # unidentified peers of one address, at one time
_MOST_IN_ALL = 512  # unidentified peers of all addresses
_TURN_SECONDS = 0.05  # of turns, after which the sockets are looked at again: more may have come
_SAVED_SECONDS = 0.5  # by which a quiet peer may be ahead of the others in the order of service


def _is_over(began: float) -> bool:
    """Whether a turn that began at this time has taken long enough."""
    return time.perf_counter() - began > _TURN_SECONDS


class Turns:
    """Serves first the peers that have taken the least of the server's time lately.

    The costs of messages differ by a factor of a thousand: turns by number of messages would give most of the time to
    the peers with the costliest requests. This is start-time fair queueing (Goyal, Vin and Cheng 1996): each peer has a
    virtual time, in seconds of service. The peer with the lowest is next, and moves on by the seconds that it takes. A
    peer that takes less than its share stays a little behind the others, and so is next whenever it asks. It cannot
    save up more than a little: many peers that were quiet for long could keep the others waiting together.
    """

    def __init__(self) -> None:
        self._present = self._last = 0.0  # the virtual time of the peer that was served last; the highest one

    def greet(self, peer: Peer) -> None:
        """Places a new connection near the front: its introduction takes no time, and need not wait for others."""
        peer.virtual_time = self._present

    def admit(self, peer: Peer) -> None:
        """Places a peer that has introduced itself behind all others: connecting again is no way to the front."""
        peer.virtual_time = self._last

    def in_order(self, peers: Iterable[Peer]) -> list[Peer]:
        """Returns the peers in the order of service, the next one first."""
        return sorted(peers, key=lambda peer: peer.virtual_time)

    def charge(self, peer: Peer, seconds: float) -> None:
        """Moves a peer's virtual time on by the seconds for which it was served."""
        self._present = max(self._present, peer.virtual_time)
        peer.virtual_time = max(peer.virtual_time, self._present - _SAVED_SECONDS) + seconds
        self._last = max(self._last, peer.virtual_time)


class Listening(Protocol):
    """The service that answers the peers of a :class:`ConnectionLoop`.

    Attributes:
        refusals: counts what is refused.
    """

    refusals: RefusalLog

    def clock(self) -> float:
        """Returns seconds that do not go back."""
        ...

    def greet(self, peer: Peer) -> None:
        """Answers a new connection."""
        ...

    def note_message(self, peer: Peer) -> None:
        """Notes that the peer has sent something, or has taken something."""
        ...

    def receive(self, peer: Peer, body: bytes) -> None:
        """Handles the bytes of one message; raises a ProtocolError for bytes that are none."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """Forgets the peer of a closed connection."""
        ...


class ConnectionLoop:
    """Accepts connections, and passes the messages of peers to a service.

    Args:
        encryption: the TLS context for every connection; None for no encryption.
    """

    def __init__(self, listener: socket.socket, listening: Listening, encryption: ssl.SSLContext | None) -> None:
        self.listener, self._listening, self.encryption = listener, listening, encryption
        self.peers: list[Peer] = []
        self._turns = Turns()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve_once(self, seconds: float) -> None:
        """Waits so long at most for connections and messages, and serves them."""
        self._serve_selected(self._selector.select(timeout=seconds))
        self._watch()

    @property
    def has_turns(self) -> bool:
        """Whether messages were read that are not handled yet, of which no selector tells."""
        return any(peer.has_turn for peer in self.peers)

    def _serve_selected(self, selected: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        if any(key.fileobj is self.listener for key, _ in selected):
            self._accept()
        ready = [(key.data, events) for key, events in selected if key.data is not None]
        self._close_strangers(waiting={peer for peer, _ in ready})
        self._serve_all(ready)

    def _serve_all(self, ready: Sequence[tuple[Peer, int]]) -> None:
        """Serves in turn the peers whose sockets are ready, and those with messages that were read and not handled."""
        left = [(peer, selectors.EVENT_READ) for peer in self.peers if peer.has_turn]
        turns: dict[Peer, int] = {}
        for peer, events in [*left, *ready]:
            turns[peer] = turns.get(peer, 0) | events
        for peer in turns:  # at once, also for later turns: a peer that sends or takes a tensor slowly is alive
            self._listening.note_message(peer)
        for peer in self._turns.in_order(turns):
            if peer not in self.peers:
                continue  # it was closed meanwhile
            began = time.perf_counter()
            with self._turn_of(peer):
                self._serve(peer, turns[peer])
            if _is_over(began):
                return  # other connections may be ready now: look again

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self.listener.accept()
        except (OSError, MemoryError) as error:  # such as too many open files
            self._listening.refusals.count("connection", "a stranger", error)
            time.sleep(0.05)  # the connection stays in the queue: do not spin
            return
        try:
            if self.encryption is not None:
                connection = tls.accepted(self.encryption, connection)
        except (OSError, MemoryError) as error:  # the peer has gone again
            self._listening.refusals.count("connection", "a stranger", error)
            return connection.close()
        peer = Peer(Channel(connection, SMALL), since=self._listening.clock(), address=address)
        self.peers.append(peer)
        self._turns.greet(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if self.encryption is None:
            self._listening.greet(peer)

    def _secure(self, peer: Peer) -> None:
        """Goes on with the TLS handshake. Nothing is read from a peer before it has shown a certificate of ours."""
        try:
            peer.secured = tls.handshake(peer.channel.connection)
        except (*tls.CLOSED, ConnectionError):  # it has gone again
            self._close(peer)
        except OSError as error:
            self._listening.refusals.count("TLS", peer.name, tls.in_words(error))
            self._close(peer)
        else:
            if peer.secured:
                self._listening.greet(peer)

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
                if peer.replaced:
                    raise ExchangeError("the worker has another connection")
                self._listening.receive(peer, body)

    @contextmanager
    def _turn_of(self, peer: Peer) -> Iterator[None]:
        """Charges a peer for its turn. An error in it ends this connection, and no other."""
        began, stranger = time.perf_counter(), peer.worker is None
        try:
            yield
        except (ProtocolError, MemoryError) as error:  # the peer sends no message, or more than there is room for
            self._listening.refusals.count("no message", peer.name, str(error) or "no memory for what it sends")
            self._close(peer)
        except ExchangeError:
            self._close(peer)
        self._turns.charge(peer, time.perf_counter() - began)
        if stranger and peer.worker is not None:
            self._turns.admit(peer)

    def _close(self, peer: Peer) -> None:
        """Closes a peer's connection."""
        self.peers = [each for each in self.peers if each is not peer]
        if peer.channel.connection.fileno() in self._selector.get_map():
            self._selector.unregister(peer.channel.connection)
        self._listening.disconnected(peer)
        peer.channel.close()

    def _close_strangers(self, waiting: Collection[Peer]) -> None:
        """Closes peers that take too long to introduce themselves, and one if there are too many of one address.

        Args:
            waiting: peers that have sent something, which nobody has read: a long step, or another turn, came first.
        """
        strangers = [peer for peer in self.peers if peer.worker is None]
        now = self._listening.clock()
        late = [peer for peer in strangers if now - peer.since > _HANDSHAKE_SECONDS]
        superfluous = [peer for peer in late if peer not in waiting and not peer.has_turn]
        counts = Counter(peer.address for peer in strangers)
        address, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > _MOST_STRANGERS or len(strangers) > _MOST_IN_ALL:
            of_address = [peer for peer in strangers if peer.address == address]
            # A worker far away takes a while to answer: peers that have begun to, and the youngest, stay.
            superfluous.append(min(of_address, key=lambda peer: (peer.has_begun, peer.since)))
        for peer in superfluous:
            if peer in self.peers:
                self._listening.refusals.count("no introduction", peer.name, "closed")
                self._close(peer)

    def _watch(self) -> None:
        """Watches for messages of each peer, and for when a peer that did not take an answer at once can take it."""
        for peer in self.peers:
            reads = 0 if peer.channel.is_full else selectors.EVENT_READ
            self._select(peer, reads | (selectors.EVENT_WRITE if peer.channel.unsent else 0))

    def _select(self, peer: Peer, events: int) -> None:
        connection = peer.channel.connection
        known = self._selector.get_map().get(connection.fileno())  # by number: a look-up by the socket is slow
        if known is None and events:
            self._selector.register(connection, events, peer)
        elif known is not None and not events:
            self._selector.unregister(connection)
        elif known is not None and (known.events, known.data) != (events, peer):
            self._selector.modify(connection, events, peer)
