"""The order in which the server serves its connections."""

from collections.abc import Iterable

from fairseq_async.server.network.peers import Peer

_SAVED_SECONDS = 0.5


class Turns:
    """Serves first the peers that have taken the least of the server's time lately.

    The costs of messages differ by a factor of a thousand: turns by number of messages would give most of the time to
    the peers with the costliest requests. This is start-time fair queueing (Goyal, Vin and Cheng 1996): each peer has a
    place, in seconds of service. The peer with the lowest place is next, and moves on by the seconds that it takes. A
    peer that takes less than its share stays a little behind the others' places, and so is next whenever it asks. It
    cannot save up more than a little: many peers that were quiet for long could keep the others waiting together.
    """

    def __init__(self) -> None:
        self._present = self._last = 0.0  # the place of the peer that was served last; the highest place

    def greet(self, peer: Peer) -> None:
        """Places a new connection near the front: its introduction takes no time, and need not wait for others."""
        peer.place = self._present

    def admit(self, peer: Peer) -> None:
        """Places a peer that has introduced itself behind all others: connecting again is no way to the front."""
        peer.place = self._last

    def in_order(self, peers: Iterable[Peer]) -> list[Peer]:
        """Returns the peers in the order of service, the next one first."""
        return sorted(peers, key=lambda peer: peer.place)

    def charge(self, peer: Peer, seconds: float) -> None:
        """Moves a peer's place on by the seconds for which it was served."""
        self._present = max(self._present, peer.place)
        peer.place = max(peer.place, self._present - _SAVED_SECONDS) + seconds
        self._last = max(self._last, peer.place)
