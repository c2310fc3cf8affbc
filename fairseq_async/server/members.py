"""Who takes part in a run, and for how many workers a round waits."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fairseq_async.errors import RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.server.plan import Message

_COMING = 600.0  # seconds for which a worker is waited for that has not come yet: it may have to compile something
JOINERS = 16  # workers beyond those that were announced, at one time


@dataclass
class Peer:
    """One connection; ``worker`` is None until it has proved that it belongs to the run."""

    channel: Channel
    challenge: str = ""  # what it has to answer
    worker: int | None = None
    admitted: bool = False  # its model and method are those of the run
    instance: str = ""  # the process: it may connect again when a connection breaks
    remote: bool = False  # tensors come and go behind the messages, not in shared memory
    waiting: str | None = None  # the kind of a message that is not answered yet
    report: Message = field(default_factory=dict)  # what the worker said of itself with its last update
    served: float = 0.0  # seconds for which the server worked on its last update
    since: float = 0.0  # of the connection, by the clock
    heard: float = 0.0  # the last word

    @property
    def id(self) -> int:
        """Its worker, once it is known."""
        assert self.worker is not None
        return self.worker

    @property
    def name(self) -> str:
        return "a stranger" if self.worker is None else f"worker {self.worker}"


class Members:
    """The workers of a run. They may come late, die, come back, be paused, or join without having been announced.

    Args:
        announced: workers 0 to ``announced - 1`` are expected; others may join.
        clock: seconds.

    Attributes:
        timeout: seconds without a word after which nobody waits for a worker any more.
        waits_for_dead: whether that time is granted also to one whose connection has closed.
        idle: workers for which nothing is left to do.
    """

    def __init__(self, announced: int, clock: Callable[[], float]) -> None:
        self.announced, self.clock = announced, clock
        self.timeout, self.waits_for_dead = 60.0, True
        self.peers: dict[int, Peer] = {}
        self.idle: set[int] = set()
        self.joined: set[int] = set()
        self._left_at: dict[int, float] = {}
        self._began = clock()

    @property
    def capacity(self) -> int:
        return self.announced + JOINERS

    def number(self, asked: int | None, joins: bool, instance: str) -> int:
        """The id of a worker that comes in, or comes back; one that ``joins`` was not announced, and may ask for any.

        Raises:
            RefusedError: there is no such worker, or it is here already as another process.
        """
        if joins and asked is None:
            free = [worker for worker in range(self.announced, self.capacity) if worker not in self.peers]
            if not free:
                raise RefusedError(f"{JOINERS} workers have joined this run already; there is room for no more")
            return free[0]
        known = range(self.announced, self.capacity) if joins else range(self.announced)
        if asked not in known:
            raise RefusedError(f"this run has {self.announced} workers; there is no worker {asked}")
        assert asked is not None
        here = self.peers.get(asked)
        if here is not None and here.instance != instance and not self.is_silent(asked):
            raise RefusedError(f"worker {asked} is here already")
        return asked

    def enter(self, peer: Peer) -> None:
        self.peers[peer.id] = peer
        self.joined.add(peer.id)
        self._left_at.pop(peer.id, None)
        self.hear(peer)

    def leave(self, peer: Peer, for_good: bool) -> bool:
        """The connection is closed, by a worker that will not come back or otherwise. False if it did not count."""
        if peer.worker is None or self.peers.get(peer.worker) is not peer:
            return False
        del self.peers[peer.worker]
        self.idle.discard(peer.worker)
        self._left_at[peer.worker] = float("-inf") if for_good else self.clock()
        return True

    def hear(self, peer: Peer) -> None:
        peer.heard = self.clock()

    def is_silent(self, worker: int) -> bool:
        """Nothing was heard for too long of a worker that is connected, and owes us a word."""
        peer = self.peers[worker]
        return peer.waiting is None and self.clock() - peer.heard > self.timeout

    @property
    def silent(self) -> set[int]:
        return {worker for worker in self.peers if self.is_silent(worker)}

    @property
    def awaited(self) -> set[int]:
        """For whom a round waits."""
        return {worker for worker in {*range(self.announced), *self.peers} if self._is_awaited(worker)}

    def _is_awaited(self, worker: int) -> bool:
        if worker in self.idle:
            return False
        if worker in self.peers:
            return not self.is_silent(worker)
        if worker in self._left_at:
            return self.waits_for_dead and self.clock() - self._left_at[worker] <= self.timeout
        return self.clock() - self._began <= _COMING
