"""Direction averaging: the outer rule of Decoupled DiLoCo."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fairseq_async.algorithms.momentum_rule import MomentumRule, at_least_one, copied
from fairseq_async.algorithms.rule import State, fills
from fairseq_async.algorithms.update import Update

_CANCELLED = 1e-6  # of Σ w: a few times what fp32 rounds the sum of unit vectors by


class DirectionAveraging(MomentumRule):
    """One Nesterov step on a round's updates, whose lengths and directions are averaged apart (Decoupled DiLoCo, arXiv
    2604.21428).

    For each tensor, over the updates v of a round, of so many tokens and local steps::

        w = tokens²/steps
        Δ = (Σ w|v| / Σ w) · unit(Σ w·unit(v))            embeddings:  Δ = Σ w·v / Σ w
        m ← βm + Δ;  θ ← θ − ε(βm + Δ)

    The mean of updates that point apart is short; this one is as long as they are. Where nobody counts tokens, w is the
    number of local steps. The paper sends fragments of the model in turn: here the whole model is the one fragment.

    Args:
        lr: ε.
        momentum: β in [0, 1).
        round_size: updates in a round, as long as :meth:`limit_round` does not say otherwise.
        tensors: number of elements of each tensor of the model, in the order of the flat parameters.
        embeddings: which of the tensors are embeddings.

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
        look_ahead: bool = False,
    ) -> None:
        super().__init__(lr, momentum, look_ahead)
        self.round_size = at_least_one("round_size", round_size)
        self.tensors, self.embeddings = list(tensors), frozenset(embeddings)
        self.buffer: Tensor | None = None  # of each tensor Σ w·unit(v); of an embedding Σ w·v
        self.lengths = [0.0] * len(self.tensors)  # Σ w|v|
        self.weight = 0.0  # Σ w
        self.count = 0

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """One arrival; True for the last of a round, which steps."""
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
        """The last of a round does."""
        return fills(self.count, self.round_size, ahead)

    def limit_round(self, updates: int) -> None:
        """The next rounds have so many updates."""
        self.round_size = at_least_one("updates", updates)

    def state_dict(self) -> State:
        """The momentum, and the updates that wait for their step."""
        sums = {"buffer": self.buffer, "lengths": self.lengths, "weight": self.weight, "count": self.count}
        return super().state_dict() | sums

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
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
            elif length > 0:
                total.add_(own, alpha=weight / length)
        self.weight += weight
        self.count += 1

    def _average(self) -> Tensor | None:
        """Δ of the round; None where all its updates weigh nothing."""
        if self.buffer is None or self.weight == 0:
            return None
        for number, total in enumerate(self.buffer.split(self.tensors)):
            if number in self.embeddings:
                total.div_(self.weight)
            elif (length := float(total.double().norm())) > _CANCELLED * self.weight:
                total.mul_(self.lengths[number] / self.weight / length)
            else:
                total.zero_()  # the directions cancel: what is left of them is rounding, and points nowhere
        return self.buffer


def token_weight(update: Update) -> float:
    """w = tokens²/steps; the steps where no tokens were counted."""
    if not update.tokens:
        return update.weight
    return update.tokens**2 / update.weight if update.weight > 0 else 0.0
