"""Which workers take part in a run, and for which of them a round waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError

ARRIVAL_SECONDS = 600.0  # for which a worker is waited for that has not come yet: it may have to compile something
JOINERS = 16  # workers beyond those that were announced, at one time
_PATIENCE = 4.0  # times the longest that work has taken, for which a worker that shows life may ask for nothing
Pending = Literal["hello", "push", "work"]


@dataclass
class Member:
    """One connected worker.

    Attributes:
        instance: names its process: it may connect again when a connection breaks.
        heard: when its last message came.
        turn: when it has asked, or was answered, last; a sign of life is no request.
        pending: the request that it waits for an answer to; until then it owes no sign of life.
        ready: it has said hello. Before that it makes its model, which may take it minutes without a word.
    """

    worker: int
    instance: str
    heard: float
    turn: float
    pending: Pending | None = None
    ready: bool = True


@dataclass
class Conduct:
    """What one process of a worker has done, which counts on when its connection breaks and is made again.

    Attributes:
        since: when it came; where it had to wait for the run to begin, when that was.
        delivered: it has sent an update.
        longest: the most seconds from an answer to its next request.
        told_end: it knows that the run is finished.
    """

    instance: str
    since: float
    delivered: bool = False
    longest: float = 0.0
    told_end: bool = False


class Membership:
    """The workers of a run. They may come late, die, come back, be paused, or join without having been announced.

    All times are seconds of one clock, whichever the caller has.

    Args:
        announced: workers 0 to ``announced - 1`` are expected; others may join.
        now: the beginning of the run.
        timeout: seconds without a word after which nobody waits for a worker any more.
        arrival_timeout: the same for a worker that has not come yet, or is not ready; one that is expected back, as
            :meth:`expect_back` says, has ``timeout``.

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
        self._conduct: dict[int, Conduct] = {}  # of each worker's last process
        self._expected_back: set[int] = set()  # workers that had sent updates to the server before this one
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
        self.members[worker] = Member(worker, instance, now, now, ready=ready)
        before = self._conduct.get(worker)
        if before is None or before.instance != instance:
            self._conduct[worker] = Conduct(instance, now)
            if before is not None:
                self._expected_back.discard(worker)
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

    @property
    def left_for_good(self) -> list[int]:
        """The workers that have said so, for the server that may take this one's place."""
        return sorted(filter(self.has_left, self._left_at))

    def note_left(self, workers: Iterable[int]) -> None:
        """These had left for good before this server took another's place."""
        self._left_at.update(dict.fromkeys(workers, -inf))

    def is_away(self, worker: int) -> bool:
        """Whether its connection has closed without a word, and it has not come back."""
        return worker in self._left_at and not self.has_left(worker)

    def hear(self, worker: int, now: float) -> None:
        """A message of the worker has come."""
        if worker in self.members:
            self.members[worker].heard = now

    def ask(self, worker: int, now: float, update: bool = False) -> None:
        """A request of the worker has come, which its main thread has made: signs of life come from another one.

        Args:
            update: the request is an update.
        """
        member = self.members.get(worker)
        if member is None:
            return
        conduct = self._conduct[worker]
        if member.ready and member.pending is None:
            conduct.longest = max(conduct.longest, now - member.turn)
        conduct.delivered = conduct.delivered or update
        member.turn = now

    def tell_end(self, worker: int) -> None:
        """The worker is told that the run is finished."""
        if worker in self._conduct:
            self._conduct[worker].told_end = True

    def expect_back(self, workers: Iterable[int]) -> None:
        """These had sent updates to a server whose place this one takes."""
        self._expected_back.update(workers)

    def wait(self, worker: int, pending: Pending) -> None:
        """The worker waits for the answer to such a request."""
        if worker in self.members:
            self.members[worker].pending = pending

    def answered(self, worker: int, now: float) -> None:
        """The worker has its answer: it is its turn."""
        member = self.members.get(worker)
        if member is None:
            return
        if member.pending == "hello":
            self._conduct[worker].since = now
        member.pending, member.heard, member.turn = None, now, now

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

    def hangs(
        self, worker: int, now: float, since: float = -inf, work: float = 0.0, untried: float = ARRIVAL_SECONDS
    ) -> bool:
        """Whether a worker that may show life has asked for nothing for so long that its main thread must hang.

        That is longer than the timeout, and than several times the longest that it ever took to ask for something; for
        one that has sent no update, that any other took. Worker 0, which validates and writes checkpoints, is never
        taken to hang, nor is a worker that was told of the end: what it does then is its own.

        Args:
            since: what was before counts for nothing.
            work: seconds that its present work is expected to take.
            untried: the timeout of a worker that has sent no update.
        """
        member = self.members.get(worker)
        if member is None:
            return False
        conduct = self._conduct[worker]
        if worker == 0 or member.pending is not None or not member.ready or conduct.told_end:
            return False
        longest = conduct.longest if conduct.delivered else self._longest
        timeout = self.timeout if conduct.delivered else max(self.timeout, untried)
        return now - max(member.turn, since) > max(timeout, _PATIENCE * max(longest, work))

    @property
    def _longest(self) -> float:
        """The most seconds that work has taken of anybody who has sent updates."""
        return max((each.longest for each in self._conduct.values() if each.delivered), default=0.0)

    def excuse(self, seconds: float) -> None:
        """Nobody was listened to for so long: that much silence says nothing of anybody."""
        self._began += seconds
        self._left_at = {worker: at + seconds for worker, at in self._left_at.items()}
        for member in self.members.values():
            member.heard += seconds
            member.turn += seconds
        for conduct in self._conduct.values():
            conduct.since += seconds

    def awaited(self, now: float) -> set[int]:
        """The workers for which a round waits."""
        return {worker for worker in self.expected(now) if not self._owes_first_update(worker, now)}

    def expected(self, now: float) -> set[int]:
        """The workers of which an update may come: they are at work, or are still to come, or to come back."""
        return {worker for worker in {*range(self.announced), *self.members} if self._is_expected(worker, now)}

    def _owes_first_update(self, worker: int, now: float) -> bool:
        """Whether a worker has sent no update for so long that no round waits for its first one.

        For one that was not announced no round does: it may never send any. Another may have to compile something, and
        its first work may take several times as long as that of others. Signs of life do not prolong that.
        """
        conduct = self._conduct.get(worker)
        if worker == 0 or conduct is None or conduct.delivered or worker in self._expected_back:
            return False
        patience = max(self.arrival_timeout, self.timeout, _PATIENCE * self._longest)
        return worker >= self.announced or now - conduct.since > patience

    def _is_expected(self, worker: int, now: float) -> bool:
        member = self.members.get(worker)
        if member is not None:
            return member.pending != "work" and not self.is_silent(worker, now)
        if worker in self._left_at:
            return self.waits_for_dead and now - self._left_at[worker] <= self.timeout
        # who was at work when another server died is back soon, or dead
        patience = self.timeout if worker in self._expected_back else self.arrival_timeout
        return now - self._began <= patience

    def state_dict(self) -> State:
        """Who is here, away and idle, for a simulation that is stopped; a real server's workers connect again."""
        members = {worker: (m.instance, m.heard, m.pending) for worker, m in self.members.items()}
        return {"members": members, "left_at": self._left_at, "joined": self.joined}

    def load_state_dict(self, state: State) -> None:
        self.members, self._conduct = {}, {}
        for worker, (instance, heard, pending) in state["members"].items():
            self.members[worker] = Member(worker, instance, heard, heard, pending)
            self._conduct[worker] = Conduct(instance, heard)
        self._left_at, self.joined = dict(state["left_at"]), set(state["joined"])
