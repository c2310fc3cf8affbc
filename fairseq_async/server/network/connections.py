"""The connections of a run's server: who comes in, what each is answered, and who is gone."""

from collections.abc import Callable

from torch import Tensor

from fairseq_async.config import MOST_STREAMS
from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.server import protocol
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.peers import Handshake, Peer, RefusalLog
from fairseq_async.server.protocol import Answer, Introduce, PushReply, Request, Welcome, WorkReply

_UNREAD = 32  # answers that may wait for a peer to take them; a worker waits for one at a time


class Connections:
    """Lets in workers that know the run's token, and answers them. What they ask is answered by a subclass.

    Args:
        token: what a worker must know to come in.
        workers: how many workers are expected; their ids are 0 to ``workers - 1``.
        clock: seconds that do not go back.

    Attributes:
        peers: by worker, those who have introduced themselves.
    """

    def __init__(self, token: str, workers: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.handshake = Handshake(token)
        self.membership = Membership(workers, clock())
        self.peers: dict[int, Peer] = {}
        self.refusals = RefusalLog()

    def greet(self, peer: Peer) -> None:
        """Answers a new connection with a challenge."""
        self.answer(peer, self.handshake.greet(peer))

    def hear(self, peer: Peer) -> None:
        """Something has come from the peer, or was taken by it."""
        if self.has(peer):
            self.membership.hear(peer.id, self.clock())

    def has(self, peer: Peer) -> bool:
        """Whether this is the connection of its worker; there may be a newer one."""
        return peer.worker is not None and self.peers.get(peer.worker) is peer

    def disconnected(self, peer: Peer) -> None:
        """The connection is closed."""
        if self.has(peer):
            del self.peers[peer.id]

    def introduce(self, peer: Peer, request: Request) -> Answer:
        """Makes a peer that proves to know the token a worker, or one more stream of a worker.

        Raises:
            RefusedError: it does not, or there is no room for it.
        """
        introduce = self.handshake.checked(peer, request)
        if introduce.stream_of is not None:
            return self._add_stream(peer, introduce, introduce.stream_of)
        now, instance = self.clock(), introduce.instance[:64]
        worker = self.membership.number(introduce.worker, introduce.joins, instance, now)
        if (before := self.peers.get(worker)) is not None:  # its connection broke, or it was silent
            self.disconnected(before)
            before.channel.end()
        self.peers[worker] = peer
        self.membership.enter(worker, instance, now, ready=False)
        return self.handshake.complete(peer, introduce, worker, self.membership)

    def _add_stream(self, peer: Peer, introduce: Introduce, challenge: str) -> Answer:
        """Makes a connection one on which there are pieces of a worker's tensors."""
        main = next((other for other in self.peers.values() if other.challenge == challenge), None)
        if main is None or main.admitted:
            raise RefusedError("there is no worker that has introduced itself, and not said hello, by that challenge")
        if len(main.channel.streams) >= MOST_STREAMS:
            raise RefusedError(f"a worker has {MOST_STREAMS} connections at most")
        main.channel.add(peer.channel)
        peer.stream_of = main
        return self.handshake.complete(peer, introduce, main.id, self.membership)

    def answer(self, peer: Peer, answer: Answer, tensor: Tensor | None = None) -> None:
        """Sends an answer, or leaves it to the event loop where the connection does not take it at once."""
        if self.has(peer):
            self.membership.answered(peer.id, self.clock())  # from now on it is its turn
            if isinstance(answer, PushReply | WorkReply | Welcome) and answer.finished:
                self.membership.tell_end(peer.id)
        peer.channel.queue(protocol.encode(answer), tensor)
        if peer.channel.unsent > _UNREAD:  # it asks on and on, and does not read: its answers must not fill the memory
            self.refusals.count("unread answers", peer.name, "disconnected")
            peer.channel.drop()
            return
        try:
            peer.channel.flush()
        except AsyncError:
            self.disconnected(peer)  # it died; the event loop will find its connection closed

    def refuse(self, peer: Peer, kind: str, error: object, said: str | None = None) -> None:
        """Answers with an error. A stranger has one attempt."""
        self.refusals.count(kind, peer.name, error)
        self.answer(peer, protocol.ErrorReply(said or str(error)))
        if peer.worker is None:
            peer.channel.end()
