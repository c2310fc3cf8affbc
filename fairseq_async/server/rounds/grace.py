"""How long a round stays open for updates that are about to come (Liu et al. 2024, arXiv 2401.09135)."""

from collections.abc import Collection
from math import inf

from fairseq_async.algorithms.rule import State
from fairseq_async.server.plan import Plan

_ROUNDING = 1e-6  # of the time that work takes


class GracePeriod:
    """A grace period. It begins with the first update of a round, and ends early when no more update can come in it.

    A worker is expected if its present steps, at the speed of its last ones, are done in time; a worker of unknown
    speed may come at any time. Waiting for workers that will be late anyway would cost all others the whole period in
    every round.

    Args:
        seconds: length of the period; None for a round that stays open until it is complete.

    Attributes:
        deadline: when the present period ends; None if there is none.
        steps_together: whether the updates of a round are one step of the rule.
    """

    steps_together = False

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.deadline: float | None = None
        self._begun: dict[int, float] = {}

    def begin_work(self, worker: int, now: float) -> None:
        """Notes when a worker was given its work."""
        self._begun[worker] = now

    def forget(self, worker: int) -> None:
        """Forgets a worker that is gone; one that comes back is due at once."""
        self._begun.pop(worker, None)

    def continues(self, arrived: int | None, others: Collection[int], plan: Plan, now: float) -> bool:
        """Whether the round stays open for any of the others at work.

        Args:
            arrived: the worker whose update has just joined the round; None where only the others have changed.
        """
        if self.seconds is None or arrived is None:
            return True
        if self.deadline is None:
            self.deadline = now + self.seconds
        factor = min(1.0, self._seconds_over_expected(arrived, plan, now))
        return any(self._may_come(worker, plan, factor) for worker in others)

    def close(self) -> None:
        """Ends the period with its round."""
        self.deadline = None

    def _seconds_over_expected(self, worker: int, plan: Plan, now: float) -> float:
        """Returns the time of a worker's work over the expected time: what speeds up one worker may speed up all."""
        expected = plan.expected_seconds(worker)
        return (now - self._begun[worker]) / expected if expected and worker in self._begun else 1.0

    def _may_come(self, worker: int, plan: Plan, factor: float) -> bool:
        assert self.deadline is not None
        expected = plan.expected_seconds(worker)
        begun = self._begun.get(worker, -inf)  # its work began before this server did: it is due
        return expected is None or begun + (factor - _ROUNDING) * expected <= self.deadline

    def state_dict(self) -> State:
        return {"deadline": self.deadline, "begun": self._begun}

    def load_state_dict(self, state: State) -> None:
        self.deadline, self._begun = state["deadline"], dict(state["begun"])
