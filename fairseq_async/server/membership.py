"""Which workers take part in a run, and for which of them a round waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError

ARRIVAL_SECONDS = 600.0  # to wait for a worker that has not come yet: it may have to compile something
JOINERS = 16  # how many workers that were not announced may be connected at one time
_PATIENCE = 4.0  # times the longest work so far, for which a worker that shows life may make no request
Pending = Literal["hello", "push", "work", "end"]


@dataclass
class Member:
    """One connected worker.

    Attributes:
        instance: names the worker's process, which may connect again when a connection breaks.
        heard: time of its last message.
        turn: time of its last request, or of the last answer to it; a sign of life is no request.
        pending: the request whose answer the worker waits for; while it waits, it need not send signs of life.
        ready: whether it has said hello. Before that it makes its model, which may take minutes without a message.
    """

    worker: int
    instance: str
    heard: float
    turn: float
    pending: Pending | None = None
    ready: bool = True


@dataclass
class Conduct:
    """The record of one process of a worker. It is kept when the connection breaks and is made again.

    Attributes:
        since: time when the process came, or when the run began, if the process had to wait for that.
        delivered: whether it has sent an update.
        longest: the longest time in seconds from an answer to the process's next request.
        told_end: whether it was told that the run is finished.
    """

    instance: str
    since: float
    delivered: bool = False
    longest: float = 0.0
    told_end: bool = False


class Membership:
    """The workers of a run. They may come late, die, come back, be paused, or join without having been announced.

    All times are seconds of one clock, the caller's.

    Args:
        announced: workers 0 to ``announced - 1`` are expected; others may join.
        now: time at which the server starts.
        timeout: seconds without a message after which no round waits for a worker any more.
        arrival_timeout: the same for a worker that has not come yet, or is not ready. For a worker that is expected
            back (see :meth:`expect_back`) it is ``timeout``.

    Attributes:
        members: the workers that are connected.
        joined: the workers that have been ready at some time.
        waits_for_dead: whether rounds wait for ``timeout`` also for a worker whose connection has closed.
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
        """The connected workers that wait for work."""
        return {worker for worker, member in self.members.items() if member.pending == "work"}

    @property
    def computing(self) -> set[int]:
        """The connected workers that wait for no answer."""
        return {worker for worker, member in self.members.items() if member.pending is None}

    def assign_id(self, asked: int | None, joins: bool, instance: str, now: float) -> int:
        """Returns the id of a worker that comes in, or comes back.

        A worker that ``joins`` was not announced; where it asks for no id it gets a free one, if possible not one of a
        worker that may come back.

        Raises:
            RefusedError: there is no such worker, it is here already as another process, or there is no room.
        """
        if joins and asked is None:
            free = [worker for worker in range(self.announced, self.capacity) if worker not in self.members]
            if not free:
                raise RefusedError(f"{JOINERS} workers have joined this run already; there is room for no more")
            return min(free, key=lambda worker: self._may_come_back(worker, now))
        known = range(self.announced, self.capacity) if joins else range(self.announced)
        if asked is None:
            raise RefusedError("this is the server of a run, not a shard of one")
        if asked not in known:
            raise RefusedError(f"this run has {self.announced} workers; there is no worker {asked}")
        here = self.members.get(asked)
        if here is not None and here.instance != instance and not self.is_silent(asked, now):
            raise RefusedError(f"worker {asked} is here already")
        return asked

    def _may_come_back(self, worker: int, now: float) -> bool:
        """Whether a worker that is not connected was at work within the timeout: its process may connect again."""
        gone = self._left_at.get(worker, self._began if worker in self._expected_back else -inf)
        return now - gone <= self.timeout

    @property
    def ready(self) -> int:
        """Number of workers that are connected and ready."""
        return sum(member.ready for member in self.members.values())

    @property
    def unready(self) -> set[int]:
        """The workers that are connected but not ready."""
        return {worker for worker, member in self.members.items() if not member.ready}

    def connect(self, worker: int, instance: str, now: float, ready: bool = True) -> None:
        """Notes that a worker is connected. One that is not ready yet becomes so by :meth:`make_ready`."""
        self.members[worker] = Member(worker, instance, now, now, ready=ready)
        before = self._conduct.get(worker)
        if before is None or before.instance != instance:
            self._conduct[worker] = Conduct(instance, now)
            if before is not None:
                self._expected_back.discard(worker)
        self._left_at.pop(worker, None)
        if ready:
            self.joined.add(worker)

    def make_ready(self, worker: int) -> None:
        """Notes that a worker is ready."""
        if worker in self.members:
            self.members[worker].ready = True
            self.joined.add(worker)

    def leave(self, worker: int, for_good: bool, now: float) -> None:
        """Notes that a worker's connection is closed; ``for_good`` if the worker said that it will not come back."""
        if self.members.pop(worker, None) is not None:
            self._left_at[worker] = -inf if for_good else now

    def has_left(self, worker: int) -> bool:
        """Whether a worker has said that it will not come back."""
        return self._left_at.get(worker) == -inf

    @property
    def left_for_good(self) -> list[int]:
        """The workers that have said that they will not come back, for a server that may replace this one."""
        return sorted(filter(self.has_left, self._left_at))

    def note_left(self, workers: Iterable[int]) -> None:
        """Marks workers that had left for good before this server replaced one that died."""
        self._left_at.update(dict.fromkeys(workers, -inf))

    def is_away(self, worker: int) -> bool:
        """Whether a worker's connection has closed without a goodbye, and the worker has not come back."""
        return worker in self._left_at and not self.has_left(worker)

    def note_message(self, worker: int, now: float) -> None:
        """Notes that a message of the worker has come."""
        if worker in self.members:
            self.members[worker].heard = now

    def ask(self, worker: int, now: float, update: bool = False) -> None:
        """Notes a request of the worker. Its main thread makes requests; signs of life come from another thread.

        Args:
            update: whether the request is an update.
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
        """Notes that the worker is told that the run is finished."""
        if worker in self._conduct:
            self._conduct[worker].told_end = True

    def expect_back(self, workers: Iterable[int]) -> None:
        """Marks workers that had sent updates to the server that this one replaces: they are expected again soon."""
        self._expected_back.update(workers)

    def wait(self, worker: int, pending: Pending) -> None:
        """Notes that the worker waits for the answer to a request of this kind."""
        if worker in self.members:
            self.members[worker].pending = pending

    def answered(self, worker: int, now: float) -> None:
        """Notes that the worker has its answer: the next message is to come from the worker."""
        member = self.members.get(worker)
        if member is None:
            return
        if member.pending == "hello":
            self._conduct[worker].since = now
        member.pending, member.heard, member.turn = None, now, now

    def waiting(self, pending: Pending) -> list[int]:
        """Returns the workers that wait for the answer to a request of this kind."""
        return sorted(worker for worker, member in self.members.items() if member.pending == pending)

    def is_silent(self, worker: int, now: float) -> bool:
        """Whether a connected worker that waits for no answer has been silent for longer than its timeout."""
        member = self.members[worker]
        timeout = self.timeout if member.ready else self.arrival_timeout
        return member.pending is None and now - member.heard > timeout

    def silent(self, now: float) -> set[int]:
        """Returns the connected workers that have been silent for longer than their timeout."""
        return {worker for worker in self.members if self.is_silent(worker, now)}

    def hangs(
        self,
        worker: int,
        now: float,
        since: float = -inf,
        work: float = 0.0,
        first_update_timeout: float = ARRIVAL_SECONDS,
    ) -> bool:
        """Whether a worker that may show life has made no request for so long that its main thread must hang.

        That is longer than the timeout, and longer than several times the worker's longest time to a request; for a
        worker that has sent no update, the longest time of any other. Worker 0, which validates and writes checkpoints,
        is never taken to hang, nor is a worker that was told of the end: it may then do what it likes.

        Args:
            since: the time is counted from here at the earliest.
            work: seconds that the worker's present work is expected to take.
            first_update_timeout: the timeout of a worker that has sent no update.
        """
        member = self.members.get(worker)
        if member is None:
            return False
        conduct = self._conduct[worker]
        if worker == 0 or member.pending is not None or not member.ready or conduct.told_end:
            return False
        longest = conduct.longest if conduct.delivered else self._longest
        timeout = self.timeout if conduct.delivered else max(self.timeout, first_update_timeout)
        return now - max(member.turn, since) > max(timeout, _PATIENCE * max(longest, work))

    @property
    def _longest(self) -> float:
        """The longest time in seconds to a request, over the workers that have sent updates."""
        return max((each.longest for each in self._conduct.values() if each.delivered), default=0.0)

    def excuse(self, seconds: float) -> None:
        """Moves all times on by the seconds in which the server read no messages: they are no worker's silence."""
        self._began += seconds
        self._left_at = {worker: at + seconds for worker, at in self._left_at.items()}
        for member in self.members.values():
            member.heard += seconds
            member.turn += seconds
        for conduct in self._conduct.values():
            conduct.since += seconds

    def awaited(self, now: float) -> set[int]:
        """Returns the workers for which a round waits."""
        return {worker for worker in self.expected(now) if not self._owes_first_update(worker, now)}

    def expected(self, now: float) -> set[int]:
        """Returns the workers that may send an update: they are at work, or are still to come or to come back."""
        return {worker for worker in {*range(self.announced), *self.members} if self._is_expected(worker, now)}

    def none_is_at_work(self, now: float) -> bool:
        """Whether workers were here, or with the server before this one, no other is to come, and none whose connection
        broke can be about to come back."""
        came = self.joined or self._expected_back or self.left_for_good
        back_soon = any(self.is_away(worker) and now - at <= self.timeout for worker, at in self._left_at.items())
        return bool(came) and not back_soon and not self.expected(now)

    def _owes_first_update(self, worker: int, now: float) -> bool:
        """Whether a worker has sent no update for so long that no round waits for its first one.

        No round waits for the first update of a worker that was not announced: it may never send any. An announced
        worker may have to compile something, and its first work may take several times as long as that of others.
        Signs of life do not prolong that time.
        """
        conduct = self._conduct.get(worker)
        if worker == 0 or conduct is None or conduct.delivered or worker in self._expected_back:
            return False
        patience = max(self.arrival_timeout, self.timeout, _PATIENCE * self._longest)
        return worker >= self.announced or now - conduct.since > patience

    def _is_expected(self, worker: int, now: float) -> bool:
        member = self.members.get(worker)
        if member is not None:
            return member.pending not in ("work", "end") and not self.is_silent(worker, now)
        if worker in self._left_at:
            return self.waits_for_dead and now - self._left_at[worker] <= self.timeout
        # a worker that was at work when the server before this one died is back soon, or dead
        patience = self.timeout if worker in self._expected_back else self.arrival_timeout
        return now - self._began <= patience

    def state_dict(self) -> State:
        """Returns which workers are here, away and idle, for a stopped simulation; real workers connect again."""
        members = {worker: (m.instance, m.heard, m.pending) for worker, m in self.members.items()}
        return {"members": members, "left_at": self._left_at, "joined": self.joined}

    def load_state_dict(self, state: State) -> None:
        self.members, self._conduct = {}, {}
        for worker, (instance, heard, pending) in state["members"].items():
            self.members[worker] = Member(worker, instance, heard, heard, pending)
            self._conduct[worker] = Conduct(instance, heard)
        self._left_at, self.joined = dict(state["left_at"]), set(state["joined"])
