"""For how long an update waits for others, to start again together (Liu et al. 2024, arXiv 2401.09135)."""

from collections.abc import Iterable
from typing import Any

from fairseq_async.server.plan import Plan

_ROUNDING = 1e-6  # of the time that work takes


class Grace:
    """A grace period. It begins with the first update of a round, and ends early when nobody can be expected in it.

    When a worker comes is told by the steps that it is at and by its speed before; one without a speed may come at any
    time. To wait for those who will be late anyway would cost everybody the whole period in every round.

    Args:
        seconds: None for none.

    Attributes:
        deadline: when the present one ends, by the driver's clock; None while there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.deadline: float | None = None
        self._begun: dict[int, float] = {}

    def begin_work(self, worker: int, now: float) -> None:
        """The worker was told what to do next."""
        self._begun[worker] = now

    def goes_on(self, arrived: int, others: Iterable[int], plan: Plan, now: float) -> bool:
        """Whether the round waits, now that this worker's update has joined it, for any of those at work."""
        if self.seconds is None:
            return True
        if self.deadline is None:
            self.deadline = now + self.seconds
        pace = min(1.0, self._pace(arrived, plan, now))
        return any(self._may_come(worker, plan, pace) for worker in others)

    def _pace(self, worker: int, plan: Plan, now: float) -> float:
        """The time that it took, of the time that it was expected to take: what speeds up one may speed up all."""
        expected = plan.expected_seconds(worker)
        return (now - self._begun[worker]) / expected if expected and worker in self._begun else 1.0

    def _may_come(self, worker: int, plan: Plan, pace: float) -> bool:
        assert self.deadline is not None
        expected = plan.expected_seconds(worker)
        begun = self._begun.get(worker, 0.0)  # before this server was: it is due
        return expected is None or begun + (pace - _ROUNDING) * expected <= self.deadline

    def state_dict(self) -> dict[str, Any]:
        return {"deadline": self.deadline, "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deadline, self._begun = state["deadline"], dict(state["begun"])
