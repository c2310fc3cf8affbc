"""The connections of a run's server: peers, the proof that they belong to the run, and the answers to them."""

import hashlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fairseq_async import protocol
from fairseq_async.algorithms.threads import set_threads
from fairseq_async.errors import AsyncError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof, proves
from fairseq_async.exchange.channel import LARGEST
from fairseq_async.method.spec import ServerSettings
from fairseq_async.protocol import (
    Answer,
    Greeting,
    Hello,
    Introduce,
    Introduced,
    Push,
    PushReply,
    Request,
    Welcome,
    WorkReply,
)
from fairseq_async.protocol.notices import tell_log
from fairseq_async.server.membership import Membership

SMALL = 1 << 10  # bytes that a peer may send at a time before it has proved that it knows the token
USUAL = 1 << 18  # bytes that a worker may send at a time once its model is known
_UNREAD = 32  # answers that a peer may leave unread; a worker waits for one at a time
_USEFUL = 4
"""Threads of one process that a pass gains from: on 16 cores eight were as slow as one (docs/results/gpu.md), probably
since each needs Python's interpreter lock between two short operations. Shards have a lock each."""


@dataclass(eq=False)
class Peer:
    """One connection, and the worker at its other end.

    Attributes:
        challenge: the challenge with which the peer must prove that it knows the token.
        worker: the worker's id; None until the peer has proved that.
        hello: the worker's hello, while it waits for worker 0 to describe the run.
        admitted: whether its model and method are those of the run.
        remote: whether tensors follow the messages; otherwise they go through shared memory.
        server_seconds: how long the server worked on its last update.
        since: when the connection was made.
        address: the address from which it was made.
        secured: whether the peer has shown in a TLS handshake a certificate of the run's authority.
        push: its update that waits for an answer.
        virtual_time: seconds of service, by which it comes in the order of service.
        replaced: whether its worker has another connection by now, on which it sends again what has no answer.
    """

    channel: Channel
    challenge: str = ""
    worker: int | None = None
    hello: Hello | None = None
    admitted: bool = False
    remote: bool = False
    server_seconds: float = 0.0
    since: float = 0.0
    address: str = ""
    secured: bool = False
    push: Push | None = None
    virtual_time: float = 0.0
    replaced: bool = False

    @property
    def id(self) -> int:
        """The worker's id; only for a peer that has introduced itself."""
        assert self.worker is not None
        return self.worker

    @property
    def has_turn(self) -> bool:
        """Whether a message of the peer was read, is not handled yet, and may be handled now."""
        return self.channel.has_message and not self.channel.is_full

    @property
    def has_begun(self) -> bool:
        """Whether the peer has begun to introduce itself."""
        return self.secured or self.channel.has_begun

    @property
    def name(self) -> str:
        return "a stranger" if self.worker is None else f"worker {self.worker}"


class RefusalLog:
    """Counts what the server refuses, and writes the first, second, fourth, eighth, … of a kind to stderr: a flood must
    not fill the disk.

    Attributes:
        counts: number of refusals by kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count_mistake(self, source: str, error: Exception) -> None:
        """Counts a mistake of this program's own; a mistake that is written comes with its traceback."""
        if self.count("internal error", source, repr(error)):
            for line in "".join(traceback.format_exception(error)).splitlines():
                tell_log(line)

    def count(self, kind: str, who: str, what: object) -> bool:
        """Counts a refusal of this kind, of something that ``who`` has sent; returns whether it was written."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if count & (count - 1):
            return False
        tell_log(f"refused ({kind}, {count} so far): {who}: {str(what)[:200]}")
        return True


class Handshake:
    """The first messages of a connection: the server's challenge, the worker's proof and challenge, the server's proof.

    Args:
        token: the secret that both sides know.

    Attributes:
        run: name of the run, the same in all processes with its token.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self.run = hashlib.sha256(f"run {token}".encode()).hexdigest()[:16]
        self._instance = challenge()  # names this process; a new name after each restart

    def greet(self, peer: Peer) -> Greeting:
        """Returns the first message on a connection, with a new challenge."""
        peer.challenge = challenge()
        return Greeting(peer.challenge)

    def checked(self, peer: Peer, request: Request) -> Introduce:
        """Returns the peer's introduction, checked.

        Raises:
            RefusedError: the request is something else, or its proof is wrong.
        """
        if not isinstance(request, Introduce):
            raise RefusedError("introduce yourself first")
        if not proves(request.proof, self._token, "worker", peer.challenge, request.challenge):
            raise RefusedError("this server belongs to another run (wrong token)")
        return request

    def complete(self, peer: Peer, introduce: Introduce, worker: int, membership: Membership) -> Introduced:
        """Makes the peer a worker; returns the answer with the server's proof."""
        peer.worker, peer.channel.largest = worker, LARGEST
        own = proof(self._token, "server", peer.challenge, introduce.challenge)
        return Introduced(own, worker, membership.announced, self._instance, membership.timeout)


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


def use_idle_cores(peers: Mapping[int, Peer], membership: Membership, settings: ServerSettings) -> None:
    """Lets passes over memory use the cores of this machine on which no worker computes: all, when all workers wait."""
    computing = sum(not peers[worker].remote for worker in membership.computing & set(peers))
    idle = max(1, len(os.sched_getaffinity(0)) - computing)
    set_threads(min(idle, _USEFUL * settings.server_shards))
