"""Rounds of a quorum with grace (Decoupled DiLoCo, arXiv 2604.21428)."""

from collections.abc import Collection

from fairseq_async.algorithms.rule import State
from fairseq_async.server.plan import Plan
from fairseq_async.server.rounds.grace import GracePeriod


class Quorum(GracePeriod):
    """A round that stays open until K updates have come, and then for a grace period; its updates are one step.

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
