"""The interface of what decides how long a round, or a step, stays open for further updates."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from fairseq_async.algorithms.rule import State
from fairseq_async.server.membership import Membership

OPEN = 1 << 30
"""The size of a round that no number of updates completes."""


class Waiting(ABC):
    """Decides who is waited for, and how long. It reads no clock: all times are of its caller's.

    Attributes:
        size: number of updates with which a round is complete.
        deadline: when the round closes if no update comes; None while no update waits, or without an end.
        steps_together: whether the updates of a round are one step of the rule.
    """

    steps_together: ClassVar[bool]
    size = OPEN
    deadline: float | None

    def awaited(self, membership: Membership, now: float) -> set[int]:
        """Returns the workers that a round may wait for."""
        return membership.awaited(now)

    @abstractmethod
    def limit(self, awaited: int) -> int | None:
        """Notes how many workers a round may wait for now; returns how many updates a step of the rule may wait for
        from now on, or None where that is not known before the round closes."""

    @abstractmethod
    def begin_work(self, worker: int, now: float, micro_batches: int = 1) -> None:
        """Notes when a worker was given its work, a gradient of so many micro-batches."""

    @abstractmethod
    def continues(self, arrived: int | None, others: Collection[int], now: float, held: int = 0) -> bool:
        """Whether the round stays open for any of the others, which are at work.

        Args:
            arrived: the worker whose update has just joined the round; None where only the others have changed.
            held: number of updates in the round.
        """

    @abstractmethod
    def remove_worker(self, worker: int) -> None:
        """Forgets a worker that is gone."""

    @abstractmethod
    def close(self) -> None:
        """Ends the wait with its round, if one is open."""

    @abstractmethod
    def state_dict(self) -> State:
        """Returns what another object needs to go on."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
