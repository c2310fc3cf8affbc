"""The peers of a server's connections, and the proof that they belong to the run."""

import hashlib
import os
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fairseq_async.algorithms.threads import set_threads
from fairseq_async.errors import RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.authentication import challenge, proof, proves
from fairseq_async.exchange.channel import LARGEST
from fairseq_async.method.spec import ServerSettings
from fairseq_async.protocol import Greeting, Hello, Introduce, Introduced, Push, Request
from fairseq_async.protocol.notices import tell_log
from fairseq_async.server.membership import Membership

SMALL = 1 << 10  # bytes that a peer may send at a time before it has proved that it knows the token
USUAL = 1 << 18  # bytes that a worker may send at a time once its model is known
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


def use_idle_cores(peers: Mapping[int, Peer], membership: Membership, settings: ServerSettings) -> None:
    """Lets passes over memory use the cores of this machine on which no worker computes: all, when all workers wait."""
    computing = sum(not peers[worker].remote for worker in membership.computing & set(peers))
    idle = max(1, len(os.sched_getaffinity(0)) - computing)
    set_threads(min(idle, _USEFUL * settings.server_shards))
