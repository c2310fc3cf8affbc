"""The update that a worker sends, and the interface of the rules that apply it."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One gradient or pseudo-gradient of a worker.

    Attributes:
        worker: id of the sender, counted from 0.
        sequence: number of this update among the sender's own, counted from 0; it never goes back.
        base_version: the server version from whose parameters the update was computed.
        weight: number of target tokens (hybrid asynchronous SGD) or local steps (local SGD) in the update.
        delta: flat fp32 tensor of the parameters' size: the mean gradient over ``weight`` tokens,
            or, for local SGD, the parameters before minus the parameters after the local steps. Where a model is
            exchanged in fragments, it has the size of the fragment whose turn it is.
        tokens: number of target tokens in the local steps; 0 where they are not counted.
        micro_batches: how many of them the gradient is of, where the server divides those of a step; else 1.
        missing: the tensors of the model without a gradient, as bits (:mod:`~fairseq_async.algorithms.missing`); their
            elements of ``delta`` are 0.
        share: weight of these local steps beside those of the other workers, by the workers' ranks; 1 for their mean.
    """

    worker: int
    sequence: int
    base_version: int
    weight: float
    delta: Tensor
    tokens: float = 0.0
    missing: int = 0
    micro_batches: int = 1
    share: float = 1.0


State = dict[str, Any]
"""The type that ``state_dict`` returns: tensors, numbers and containers of them, which torch loads with
``weights_only``."""


class Rule(Protocol):
    """Turns updates, in the order of their arrival, into changes of the parameters.

    A rule of your own is a subclass with ``apply``, ``state_dict`` and ``load_state_dict``; the other methods say by
    default that every update moves the parameters, and that there is no momentum.
    """

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies one update to the flat ``parameters``, in place.

        Returns:
            How much of a step of the optimizer or momentum was taken: 0 for none, 1 (or True) for a whole one.
        """
        ...

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Whether the update that comes after ``ahead`` others will move the parameters; its sender waits only then."""
        return True

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns what a worker's local steps start from: the parameters, or a new tensor where the rule looks ahead.

        Only workers see the point ahead: validation, checkpoints and the run's last parameters do not.
        """
        return parameters

    @property
    def momentum_buffer(self) -> Tensor | None:
        """The momentum, with which updates can be compared; None where there is none."""
        return None

    def limit_round(self, updates: int) -> None:
        """Sets the number of updates in a round from now on: a rule that waits for N updates must not wait for more."""
        return None

    def state_dict(self) -> State:
        """Returns all that the rule needs to go on: tensors, numbers, and containers of them."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        ...


class CompoundRule(Rule):
    """A rule that passes updates on to others, and tells all of them what it is told.

    Attributes:
        rules: these others.
    """

    rules: Sequence[Rule]

    def limit_round(self, updates: int) -> None:
        for rule in self.rules:
            rule.limit_round(updates)


class ComparingRule(Rule):
    """A rule whose momentum, or a part of each update, is in other processes: it compares and measures them."""

    def norm(self, update: Update) -> float:
        """Returns the L2 norm of the update; NaN where a part of it is missing."""
        return float(torch.linalg.vector_norm(update.delta))

    @abstractmethod
    def cosine(self, update: Update, norm: float) -> float:
        """Returns the cosine of the update, of L2 norm ``norm``, and the momentum before it; NaN without a momentum."""


def cosine_of(delta: Tensor, norm: float, direction: Tensor | None) -> float:
    """Returns the cosine of ``delta``, of L2 norm ``norm``, and a direction; NaN without one, or where one is zero."""
    if direction is None:
        return math.nan
    product = norm * float(torch.linalg.vector_norm(direction))
    return float(torch.dot(delta, direction)) / product if product > 0 else math.nan


def fills(count: int, size: int, ahead: int) -> bool:
    """Whether the update after ``ahead`` others fills a buffer of ``size`` updates, which holds ``count`` now.

    A full buffer is emptied. ``size`` may have become smaller than ``count``: then the next update empties the buffer.
    """
    missing = max(1, size - count)
    return ahead + 1 >= missing and (ahead + 1 - missing) % size == 0
