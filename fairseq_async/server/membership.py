"""Which workers take part in a run, and for which of them a round waits."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError

ARRIVAL_SECONDS = 600.0  # for which a worker is waited for that has not come yet: it may have to compile something
JOINERS = 16  # workers beyond those that were announced, at one time
Pending = Literal["hello", "push", "work"]


@dataclass
class Member:
    """One connected worker.

    Attributes:
        instance: names its process: it may connect again when a connection breaks.
        heard: when its last message came.
        pending: the request that it waits for an answer to; until then it owes no sign of life.
        ready: it has said hello. Before that it makes its model, which may take it minutes without a word.
    """

    worker: int
    instance: str
    heard: float
    pending: Pending | None = None
    ready: bool = True


class Membership:
    """The workers of a run. They may come late, die, come back, be paused, or join without having been announced.

    All times are seconds of one clock, whichever the caller has.

    Args:
        announced: workers 0 to ``announced - 1`` are expected; others may join.
        now: the beginning of the run.
        timeout: seconds without a word after which nobody waits for a worker any more.
        arrival_timeout: the same for a worker that has not come yet, or is not ready.

    Attributes:
        members: the workers that are connected.
        joined: the workers that have ever come, and were ready.
        waits_for_dead: whether ``timeout`` is granted also to a worker whose connection has closed.
    """

    def __init__(
        self, announced: int, now: float, timeout: float = 60.0, arrival_timeout: float = ARRIVAL_SECONDS
    ) -> None:
        self.announced, self.timeout, self.arrival_timeout = announced, timeout, arrival_timeout
        self.waits_for_dead = True
        self.members: dict[int, Member] = {}
        self.joined: set[int] = set()
        self._left_at: dict[int, float] = {}
        self._began = now

    @property
    def capacity(self) -> int:
        return self.announced + JOINERS

    @property
    def idle(self) -> set[int]:
        """The workers that wait for work."""
        return {worker for worker, member in self.members.items() if member.pending == "work"}

    @property
    def computing(self) -> set[int]:
        """The connected workers that wait for nothing."""
        return {worker for worker, member in self.members.items() if member.pending is None}

    def number(self, asked: int | None, joins: bool, instance: str, now: float) -> int:
        """The id of a worker that comes in, or comes back; one that ``joins`` was not announced, and may ask for any.

        Raises:
            RefusedError: there is no such worker, or it is here already as another process.
        """
        if joins and asked is None:
            free = [worker for worker in range(self.announced, self.capacity) if worker not in self.members]
            if not free:
                raise RefusedError(f"{JOINERS} workers have joined this run already; there is room for no more")
            return free[0]
        known = range(self.announced, self.capacity) if joins else range(self.announced)
        if asked is None or asked not in known:
            raise RefusedError(f"this run has {self.announced} workers; there is no worker {asked}")
        here = self.members.get(asked)
        if here is not None and here.instance != instance and not self.is_silent(asked, now):
            raise RefusedError(f"worker {asked} is here already")
        return asked

    @property
    def ready(self) -> int:
        """How many workers are connected and ready."""
        return sum(member.ready for member in self.members.values())

    @property
    def unready(self) -> set[int]:
        """The workers that are connected and not ready."""
        return {worker for worker, member in self.members.items() if not member.ready}

    def enter(self, worker: int, instance: str, now: float, ready: bool = True) -> None:
        """The worker is connected; one that is not ready will say so by :meth:`begin`."""
        self.members[worker] = Member(worker, instance, now, ready=ready)
        self._left_at.pop(worker, None)
        if ready:
            self.joined.add(worker)

    def begin(self, worker: int) -> None:
        """The worker is ready."""
        if worker in self.members:
            self.members[worker].ready = True
            self.joined.add(worker)

    def leave(self, worker: int, for_good: bool, now: float) -> None:
        """The worker's connection is closed; ``for_good`` if it has said that it will not come back."""
        if self.members.pop(worker, None) is not None:
            self._left_at[worker] = -inf if for_good else now

    def has_left(self, worker: int) -> bool:
        """Whether it has said that it will not come back."""
        return self._left_at.get(worker) == -inf

    def is_away(self, worker: int) -> bool:
        """Whether its connection has closed without a word, and it has not come back."""
        return worker in self._left_at and not self.has_left(worker)

    def hear(self, worker: int, now: float) -> None:
        """A message of the worker has come."""
        if worker in self.members:
            self.members[worker].heard = now

    def wait(self, worker: int, pending: Pending) -> None:
        """The worker waits for the answer to such a request."""
        if worker in self.members:
            self.members[worker].pending = pending

    def answered(self, worker: int, now: float) -> None:
        """The worker has its answer: it is its turn."""
        if worker in self.members:
            self.members[worker].pending, self.members[worker].heard = None, now

    def waiting(self, pending: Pending) -> list[int]:
        """The workers that wait for the answer to such a request."""
        return sorted(worker for worker, member in self.members.items() if member.pending == pending)

    def is_silent(self, worker: int, now: float) -> bool:
        """Whether nothing was heard for too long of a connected worker that owes a word."""
        member = self.members[worker]
        timeout = self.timeout if member.ready else self.arrival_timeout
        return member.pending is None and now - member.heard > timeout

    def silent(self, now: float) -> set[int]:
        """The connected workers of which nothing was heard for too long."""
        return {worker for worker in self.members if self.is_silent(worker, now)}

    def excuse(self, seconds: float) -> None:
        """Nobody was listened to for so long: that much silence says nothing of anybody."""
        self._began += seconds
        self._left_at = {worker: at + seconds for worker, at in self._left_at.items()}
        for member in self.members.values():
            member.heard += seconds

    def awaited(self, now: float) -> set[int]:
        """The workers for which a round waits."""
        return {worker for worker in {*range(self.announced), *self.members} if self._is_awaited(worker, now)}

    def _is_awaited(self, worker: int, now: float) -> bool:
        member = self.members.get(worker)
        if member is not None:
            return member.pending != "work" and not self.is_silent(worker, now)
        if worker in self._left_at:
            return self.waits_for_dead and now - self._left_at[worker] <= self.timeout
        return now - self._began <= self.arrival_timeout

    def state_dict(self) -> State:
        """Who is here, away and idle, for a simulation that is stopped; a real server's workers connect again."""
        members = {worker: (m.instance, m.heard, m.pending) for worker, m in self.members.items()}
        return {"members": members, "left_at": self._left_at, "joined": self.joined}

    def load_state_dict(self, state: State) -> None:
        self.members = {worker: Member(worker, *values) for worker, values in state["members"].items()}
        self._left_at, self.joined = dict(state["left_at"]), set(state["joined"])
