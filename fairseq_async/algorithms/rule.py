"""What every server rule offers."""

from abc import abstractmethod
from typing import Any, Protocol

from torch import Tensor

from fairseq_async.algorithms.update import Update

State = dict[str, Any]
"""What ``state_dict`` returns: tensors, numbers, and containers of them, which torch loads with ``weights_only``."""


class Rule(Protocol):
    """Turns updates, in the order of their arrival, into changes of the parameters.

    A rule of your own is a subclass with ``apply``, ``state_dict`` and ``load_state_dict``; the other methods say by
    default that every update moves the parameters, and that there is no momentum.
    """

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Takes one update in; ``parameters`` (flat) change in place.

        Returns:
            How much of a step of the optimizer or momentum was taken: 0 for none, 1 (or True) for a whole one.
        """
        ...

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Whether the update behind ``ahead`` others will move the parameters; its sender waits only then."""
        return True

    def dispatch(self, parameters: Tensor) -> Tensor:
        """What a worker's local steps start from: the parameters, or a new tensor where the rule looks ahead of them.

        Nothing else sees it: neither validation, nor checkpoints, nor the run's last parameters.
        """
        return parameters

    @property
    def momentum_buffer(self) -> Tensor | None:
        """The momentum, with which updates can be compared; None where there is none."""
        return None

    def limit_round(self, updates: int) -> None:
        """A round has only this many updates from now on: a rule that waits for N updates must not wait for more."""
        return None

    def state_dict(self) -> State:
        """All that the rule needs to go on: tensors, numbers, and containers of them."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        ...


class ComparingRule(Rule):
    """A rule whose momentum is not in this process: it says itself how an update lies to it."""

    @abstractmethod
    def cosine(self, update: Update, norm: float) -> float:
        """Of the update, whose L2 norm this is, and the momentum before it; NaN where there is none."""


def fills(count: int, size: int, ahead: int) -> bool:
    """Whether the update behind ``ahead`` others fills a buffer that has ``count`` and is emptied when it has ``size``.

    A buffer may have become smaller than what is in it: then the next update empties it.
    """
    missing = max(1, size - count)
    return ahead + 1 >= missing and (ahead + 1 - missing) % size == 0
