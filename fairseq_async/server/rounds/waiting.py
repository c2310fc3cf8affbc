"""The interface of what decides how long a round, or a step, stays open for further updates."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from fairseq_async.algorithms.rule import State
from fairseq_async.server.membership import Membership


class Waiting(ABC):
    """Decides who is waited for, and how long. It reads no clock: all times are of its caller's.

    Attributes:
        grace_period: length of the grace period in seconds; None where it is not a fixed time.
        deadline: when the round closes if no update comes; None while no update waits, or without an end.
        steps_together: whether the updates of a round are one step of the rule.
    """

    steps_together: ClassVar[bool]
    grace_period: float | None
    deadline: float | None

    def awaited(self, membership: Membership, now: float) -> set[int]:
        """Returns the workers that a round may wait for."""
        return membership.awaited(now)

    @abstractmethod
    def begin_work(self, worker: int, now: float) -> None:
        """Notes when a worker was given its work."""

    @abstractmethod
    def continues(self, arrived: int | None, others: Collection[int], now: float) -> bool:
        """Whether the round stays open for any of the others, which are at work.

        Args:
            arrived: the worker whose update has just joined the round; None where only the others have changed.
        """

    @abstractmethod
    def forget(self, worker: int) -> None:
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
