"""The connections of a run's server: lets workers in, answers them, and notes those that are gone."""

from collections.abc import Callable

from torch import Tensor

from fairseq_async import protocol
from fairseq_async.errors import AsyncError
from fairseq_async.protocol import Answer, PushReply, Request, Welcome, WorkReply
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.peers import Handshake, Peer, RefusalLog

_UNREAD = 32  # answers that a peer may leave unread; a worker waits for one at a time


class Connections:
    """Lets in workers that know the run's token, and sends them answers. A subclass handles their requests.

    Args:
        token: what a worker must know to come in.
        workers: how many workers are expected; their ids are 0 to ``workers - 1``.
        clock: returns seconds that do not go back.

    Attributes:
        peers: the peers that have introduced themselves, by worker.
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

    def note_message(self, peer: Peer) -> None:
        """Notes that the peer has sent something, or has taken something from the server."""
        if self.has(peer):
            self.membership.note_message(peer.id, self.clock())

    def has(self, peer: Peer) -> bool:
        """Whether this is its worker's present connection; there may be a newer one."""
        return peer.worker is not None and self.peers.get(peer.worker) is peer

    def is_deserted(self, now: float) -> bool:
        """Whether an unfinished run has no worker any more, and is not to wait for one."""
        return self.membership.none_is_at_work(now) and not self.membership.waiting("end")

    def disconnected(self, peer: Peer) -> None:
        """Forgets the peer of a closed connection."""
        if self.has(peer):
            del self.peers[peer.id]

    def introduce(self, peer: Peer, request: Request) -> Answer:
        """Makes a peer that proves that it knows the token a worker.

        Raises:
            RefusedError: the peer does not prove that, or there is no room for it.
        """
        introduce = self.handshake.checked(peer, request)
        self._notice_death(introduce.worker)
        now, instance = self.clock(), introduce.instance[:64]
        worker = self.membership.assign_id(introduce.worker, introduce.joins, instance, now)
        if (before := self.peers.get(worker)) is not None:  # its connection broke, or it was silent
            self._replace(before)
        self.peers[worker] = peer
        self.membership.connect(worker, instance, now, ready=False)
        return self.handshake.complete(peer, introduce, worker, self.membership)

    def _notice_death(self, worker: int | None) -> None:
        """Lets a worker leave whose connection has ended without being read to its end, since the server was busy: it
        may have been started again, and must not find itself here already."""
        before = None if worker is None else self.peers.get(worker)
        if before is not None and before.channel.is_closed():
            self._replace(before)

    def _replace(self, before: Peer) -> None:
        """Ends the connection that a worker had before this one."""
        self.disconnected(before)
        before.replaced = True
        before.channel.end()

    def answer(self, peer: Peer, answer: Answer, tensor: Tensor | None = None) -> None:
        """Sends an answer, or leaves it to the event loop if the connection does not take it at once."""
        if self.has(peer):
            self.membership.answered(peer.id, self.clock())  # from now on it is the worker's turn
            if isinstance(answer, PushReply | WorkReply | Welcome) and answer.finished:
                self.membership.tell_end(peer.id)
        peer.channel.queue(protocol.encode(answer), tensor)
        if peer.channel.unsent > _UNREAD:  # it sends requests, and reads no answers: these must not fill the memory
            self.refusals.count("unread answers", peer.name, "disconnected")
            peer.channel.drop()
            return
        try:
            peer.channel.flush()
        except AsyncError:
            self.disconnected(peer)  # it died; the event loop will find its connection closed

    def refuse(self, peer: Peer, kind: str, error: object, said: str | None = None) -> None:
        """Answers with an error; a stranger has one attempt, so its connection then ends."""
        self.refusals.count(kind, peer.name, error)
        self.answer(peer, protocol.ErrorReply(said or str(error)))
        if peer.worker is None:
            peer.channel.end()

    def answer_failure(self, peer: Peer, error: Exception) -> None:
        """Answers a failed request with an error message."""
        if isinstance(error, AsyncError):
            self.refuse(peer, type(error).__name__, error)
        elif isinstance(error, OSError):
            self.refuse(peer, "files", error, f"the server cannot use its directory: {error}")
        else:  # a mistake of this program's own: whatever it is, it must not end the others' run
            self.refusals.count_mistake(peer.name, error)
            self.answer(peer, protocol.ErrorReply(f"internal error of the server: {error!r}; see server.log"))
