"""In which order the server serves its connections."""

from collections.abc import Iterable

from fairseq_async.server.network.peers import Peer

_SAVED_SECONDS = 0.5


class Turns:
    """Serves first who has taken the least of the server's time lately.

    Messages differ in what they cost by a factor of a thousand, so that turns by their number would leave most of the
    time to those that ask for the most. This is start-time fair queueing (Goyal, Vin and Cheng 1996): each peer has a
    place, in seconds of service. The next one is that with the lowest place, and moves on by the seconds that it takes.
    Who takes less than its share stays a little behind the others' places, and so is next whenever it asks. More than a
    little nobody saves up: many that were quiet for long could keep the others waiting together.
    """

    def __init__(self) -> None:
        self._present = self._last = 0.0  # the place of the one that was served last; the highest place

    def greet(self, peer: Peer) -> None:
        """A new connection: its introduction takes no time, and is not to wait for what others ask."""
        peer.place = self._present

    def admit(self, peer: Peer) -> None:
        """It has introduced itself. It is behind all others: to connect again is no way to the front."""
        peer.place = self._last

    def in_order(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those who have something to be served, the next one first."""
        return sorted(peers, key=lambda peer: peer.place)

    def charge(self, peer: Peer, seconds: float) -> None:
        """The peer was served for so long."""
        self._present = max(self._present, peer.place)
        peer.place = max(peer.place, self._present - _SAVED_SECONDS) + seconds
        self._last = max(self._last, peer.place)
