"""How long a round of several updates stays open for others (Liu et al. 2024, arXiv 2401.09135)."""

from collections.abc import Collection
from math import inf

from fairseq_async.algorithms.rule import State
from fairseq_async.server.plan import Plan
from fairseq_async.server.rounds.waiting import OPEN, Waiting

_ROUNDING = 1e-6  # of the time that work takes


class GracePeriod(Waiting):
    """A round of a fixed size, with or without a grace period.

    The period begins with the first update of a round, and ends early when no more update can come in it.

    A worker is expected if its present steps, at the speed of its last ones, are done in time; a worker of unknown
    speed may come at any time. Waiting for workers that will be late anyway would cost all others the whole period in
    every round.

    Args:
        grace_period: length of the period in seconds; None for a round that stays open until it is complete.
        plan: knows the time that a worker's work is expected to take.
        barrier: number of updates in a round; fewer while fewer workers are awaited.
    """

    steps_together = False

    def __init__(self, grace_period: float | None, plan: Plan, barrier: int = OPEN) -> None:
        self.grace_period, self._plan = grace_period, plan
        self.size = self._barrier = barrier
        self.deadline: float | None = None
        self._begun: dict[int, float] = {}

    def limit(self, awaited: int) -> int | None:
        self.size = min(self._barrier, awaited)
        return awaited if self.grace_period is None else None

    def begin_work(self, worker: int, now: float, micro_batches: int = 1) -> None:
        self._begun[worker] = now

    def remove_worker(self, worker: int) -> None:
        """A worker that comes back is due at once."""
        self._begun.pop(worker, None)

    def continues(self, arrived: int | None, others: Collection[int], now: float, held: int = 0) -> bool:
        if held >= self.size:
            return False
        if self.grace_period is None or arrived is None:
            return True
        if self.deadline is None:
            self.deadline = now + self.grace_period
        factor = min(1.0, self._seconds_over_expected(arrived, now))
        return any(self._may_come(worker, factor) for worker in others)

    def close(self) -> None:
        self.deadline = None

    def _seconds_over_expected(self, worker: int, now: float) -> float:
        """Returns the time of a worker's work over the expected time: what speeds up one worker may speed up all."""
        expected = self._plan.expected_seconds(worker)
        return (now - self._begun[worker]) / expected if expected and worker in self._begun else 1.0

    def _may_come(self, worker: int, factor: float) -> bool:
        assert self.deadline is not None
        expected = self._plan.expected_seconds(worker)
        begun = self._begun.get(worker, -inf)  # its work began before this server did: it is due
        return expected is None or begun + (factor - _ROUNDING) * expected <= self.deadline

    def state_dict(self) -> State:
        return {"deadline": self.deadline, "begun": self._begun}

    def load_state_dict(self, state: State) -> None:
        self.deadline, self._begun = state["deadline"], dict(state["begun"])


class Quorum(GracePeriod):
    """A round of a quorum (Decoupled DiLoCo, arXiv 2604.21428).

    It stays open until K updates have come, and then for a grace period; its updates are one step.

    With fewer than K workers at work the round closes when all of them have come.

    Args:
        quorum: K.
        grace_period: length of the grace period in seconds.
        plan: see :class:`GracePeriod`.
    """

    steps_together = True

    def __init__(self, quorum: int, grace_period: float, plan: Plan) -> None:
        super().__init__(grace_period, plan)
        self.quorum = quorum
        self._arrived: set[int] = set()

    def limit(self, awaited: int) -> None:
        """Does nothing: the number of updates alone does not complete a round."""

    def continues(self, arrived: int | None, others: Collection[int], now: float, held: int = 0) -> bool:
        if arrived is not None:
            self._arrived.add(arrived)
        if not others:
            return False
        return len(self._arrived) < self.quorum or super().continues(arrived, others, now, held)

    def remove_worker(self, worker: int) -> None:
        super().remove_worker(worker)
        self._arrived.discard(worker)

    def close(self) -> None:
        super().close()
        self._arrived.clear()

    def state_dict(self) -> State:
        return super().state_dict() | {"arrived": sorted(self._arrived)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._arrived = set(state["arrived"])
