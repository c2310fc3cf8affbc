"""MLA and HeLoCo: outer rules whose workers start ahead, where the momentum is about to take the parameters."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fairseq_async.algorithms.outer.momentum_rule import MomentumRule, at_least_one
from fairseq_async.algorithms.rule import Update

_SMALLEST = 1e-8  # a vector with a smaller norm has no direction but noise; also ε of the confidence
_ALIGNED = 0.2  # smallest cosine of an update that is left as it is


class MomentumLookAhead(MomentumRule):
    """Momentum look-ahead, MLA (OpenReview 4O8nzTkHPI): an averaged momentum, and workers that start ahead along it.

    ::

        m ← γm + (1 − γ)Δ;  θ ← θ − η(Δ + γm);  a worker starts from θ − ηγm

    In the end, one update has moved θ by −η(1 + γ)Δ: by its own step and by its part in the momentum of later steps.
    The papers do not settle whether the start ahead is part of MLA or of HeLoCo alone: ``start_ahead`` switches it.

    Args:
        lr: η, for each update, whatever the number of workers; the paper uses 0.7.
        momentum: γ in [0, 1); the paper uses 0.9.
        start_ahead: whether a worker starts ahead.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, start_ahead: bool = True) -> None:
        super().__init__(lr, momentum, start_ahead)

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        momentum = self._momentum_after(update.delta, 1 - self.momentum)
        parameters.add_(update.delta, alpha=-self.lr)
        parameters.add_(momentum, alpha=-self.lr * self.momentum)
        return True


class HeLoCo(MomentumLookAhead):
    """HeLoCo (arXiv 2606.00271): MLA on updates that are turned towards the momentum where they point away from it.

    For each tensor, with Δ̂ and m̂ of length 1::

        c = cos(Δ, m);  conf = |Δ| / (|Δ| + 3|m| + ε)
        c ≥ 0.2, or |Δ| or |m| below 1e-8:  Δ stays as it is
        c < 0:      Δ ← Δ − b·(Δ·m̂)m̂,  b = min(−c·conf/2, 1/2)
        otherwise:  Δ ← |Δ|·unit((1 − λ)Δ̂ + λm̂),  λ = min((1 − c)·conf, 1)          (equation 14)
        Δ ← Δ/√k

    Args:
        lr: η.
        momentum: γ in [0, 1).
        workers: k, the number of workers.
        tensors: number of elements of each tensor of the model, in the order of the flat parameters.
        start_ahead: whether a worker starts ahead.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, lr: float, momentum: float, workers: int, tensors: Sequence[int], start_ahead: bool = True
    ) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.scale = at_least_one("workers", workers) ** -0.5
        self.tensors = list(tensors)

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        delta = update.delta.clone() if self.momentum_buffer is None else self._corrected(update.delta)
        return super().apply(parameters, replace(update, delta=delta.mul_(self.scale)))

    def _corrected(self, delta: Tensor) -> Tensor:
        assert self.momentum_buffer is not None
        pairs = zip(delta.split(self.tensors), self.momentum_buffer.split(self.tensors), strict=True)
        return torch.cat([corrected(own, momentum) for own, momentum in pairs])


def corrected(delta: Tensor, momentum: Tensor) -> Tensor:
    """Returns one tensor's Δ with HeLoCo's correction, not yet divided by √k. Norms and cosine are in float64."""
    exact, direction = delta.double(), momentum.double()
    length, along = float(exact.norm()), float(direction.norm())
    if min(length, along) < _SMALLEST:
        return delta
    direction = direction / along
    cosine = float(exact @ direction) / length
    if cosine >= _ALIGNED:
        return delta
    confidence = length / (length + 3 * along + _SMALLEST)
    if cosine < 0:
        share = min(-cosine * confidence / 2, 0.5)
        return (exact - share * cosine * length * direction).to(delta.dtype)
    blend = min((1 - cosine) * confidence, 1.0)
    mixed = (1 - blend) / length * exact + blend * direction
    return (length / float(mixed.norm()) * mixed).to(delta.dtype)
