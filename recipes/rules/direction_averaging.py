"""Direction averaging: the outer rule of Decoupled DiLoCo."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fairseq_async.algorithms.outer.momentum_rule import MomentumRule, at_least_one, copied
from fairseq_async.algorithms.rule import State, Update, fills
from fairseq_async.errors import ConfigurationError, option
from fairseq_async.method.methods import RuleContext
from fairseq_async.options.config import AsyncLocalSGDOptions, OuterLearningRate, OuterMomentum, StartAhead

_CANCELLED = 1e-6  # share of Σ w: a few times the rounding error of a sum of unit vectors in fp32
_MOST = 2.0**53  # a weight; sums of vectors times such weights are still within fp32
_LARGEST = torch.finfo(torch.float32).max
_EMBEDDINGS = ("embed", "wte", "wpe")  # in the names of embeddings: fairseq's, Llama's; GPT-2's


class DirectionAveragingOptions(AsyncLocalSGDOptions):
    """``outer direction_averaging``: one Nesterov step on the updates of a round, whose lengths and directions are
    averaged separately. A round takes the updates that come until the grace period after the K-th ends."""

    outer: Literal["direction_averaging"] = "direction_averaging"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = False
    quorum: int = Field(1, ge=1, description="updates K with which a round's grace period begins")

    def for_workers(self, workers: int) -> DirectionAveragingOptions:
        if self.quorum > workers:
            raise ConfigurationError(
                f"{option('quorum')} is {self.quorum}: there are only {workers} workers; give at most {workers}"
            )
        return self


class DirectionAveraging(MomentumRule):
    """Averages the lengths and the directions of a round's updates separately, and takes one Nesterov step on the
    result Δ (Decoupled DiLoCo, arXiv 2604.21428).

    For each tensor, with sums over the updates v of a round, and the tokens and local steps of each update::

        w = tokens²/steps
        Δ = (Σ w|v| / Σ w) · unit(Σ w·unit(v))            embeddings:  Δ = Σ w·v / Σ w
        m ← βm + Δ;  θ ← θ − ε(βm + Δ)

    A plain mean of updates that point in different directions is short; this Δ has the mean length of the updates.
    Where tokens are not counted, w is the number of local steps. The paper sends fragments of the model in turn: here
    the whole model is the one fragment.

    Args:
        lr: ε, the outer learning rate.
        momentum: β in [0, 1).
        round_size: number of updates in a round, until :meth:`limit_round` changes it.
        tensors: number of elements of each tensor of the model, in the order of the flat parameters.
        embeddings: indices of the tensors that are embeddings.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        momentum: float,
        round_size: int,
        tensors: Sequence[int],
        embeddings: Collection[int] = (),
        start_ahead: bool = False,
    ) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.round_size = at_least_one("round_size", round_size)
        self.tensors, self.embeddings = list(tensors), frozenset(embeddings)
        self.buffer: Tensor | None = None  # Σ w·unit(v) of each tensor; Σ w·v of an embedding
        self.lengths = [0.0] * len(self.tensors)  # Σ w|v| of each tensor
        self.weight = 0.0  # Σ w
        self.count = 0

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Adds one update. Takes a step with the last one of a round, and returns True for it."""
        self._add(update)
        if self.count < self.round_size:
            return False
        delta = self._average()
        if delta is not None:
            momentum = self._momentum_after(delta, 1.0)
            parameters.add_(momentum, alpha=-self.lr * self.momentum)
            parameters.add_(delta, alpha=-self.lr)
        self.buffer, self.lengths, self.weight, self.count = None, [0.0] * len(self.tensors), 0.0, 0
        return True

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Whether the update after ``ahead`` others is the last of a round, which moves the parameters."""
        return fills(self.count, self.round_size, ahead)

    def limit_round(self, updates: int) -> None:
        """Sets the number of updates in a round from now on."""
        self.round_size = at_least_one("updates", updates)

    def state_dict(self) -> State:
        """Returns the momentum, and the sums over the updates that wait for their step."""
        sums = {"buffer": self.buffer, "lengths": self.lengths, "weight": self.weight, "count": self.count}
        return super().state_dict() | sums

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.buffer, self.lengths = copied(state["buffer"]), list(state["lengths"])
        self.weight, self.count = state["weight"], state["count"]

    def _add(self, update: Update) -> None:
        if self.buffer is None:
            self.buffer = torch.zeros_like(update.delta)
        weight = token_weight(update)
        for number, (total, own) in enumerate(
            zip(self.buffer.split(self.tensors), update.delta.split(self.tensors), strict=True)
        ):
            length = float(own.double().norm())
            self.lengths[number] += weight * length
            if number in self.embeddings:
                total.add_(own, alpha=weight)
            elif length > weight / _LARGEST:  # a shorter one, of denormal numbers, has no direction in fp32
                total.add_(own, alpha=weight / length)
        self.weight += weight
        self.count += 1

    def _average(self) -> Tensor | None:
        """Returns Δ of the round; None where all its updates have weight 0."""
        if self.buffer is None or self.weight == 0:
            return None
        for number, total in enumerate(self.buffer.split(self.tensors)):
            if number in self.embeddings:
                total.div_(self.weight)
            elif (length := float(total.double().norm())) > _CANCELLED * self.weight:
                total.mul_(self.lengths[number] / self.weight / length)
            else:
                total.zero_()  # the directions cancel: only rounding errors are left, in an arbitrary direction
        return self.buffer


def token_weight(update: Update) -> float:
    """Returns w = tokens²/steps, or the number of steps where no tokens were counted; 2⁵³ at most, and 0 below 2⁻⁵³."""
    weight = update.weight
    if update.tokens:
        weight = update.tokens**2 / weight if weight > 0 else 0.0
    return min(weight, _MOST) if weight * _MOST >= 1 else 0.0


def build(options: DirectionAveragingOptions, context: RuleContext) -> DirectionAveraging:
    """Builds ``outer direction_averaging``."""
    embeddings = [number for number, name in enumerate(context.names) if _is_embedding(name)]
    return DirectionAveraging(
        options.outer_lr, options.outer_momentum, options.quorum, context.sizes, embeddings, options.start_ahead
    )


def _is_embedding(name: str) -> bool:
    """Whether a tensor of this name is an embedding, and not of a norm after one: fairseq's ``layernorm_embedding``."""
    return any(part in name for part in _EMBEDDINGS) and "norm" not in name.lower()
