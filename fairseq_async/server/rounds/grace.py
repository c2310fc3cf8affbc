"""How long a round stays open for updates that are about to come (Liu et al. 2024, arXiv 2401.09135)."""

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
        size: number of updates in a round; fewer while fewer workers are awaited.
    """

    steps_together = False

    def __init__(self, grace_period: float | None, plan: Plan, size: int = OPEN) -> None:
        self.grace_period, self._plan = grace_period, plan
        self.size = self._whole = size
        self.deadline: float | None = None
        self._begun: dict[int, float] = {}

    def limit(self, awaited: int) -> int | None:
        self.size = min(self._whole, awaited)
        return awaited if self.grace_period is None else None

    def begin_work(self, worker: int, now: float) -> None:
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
