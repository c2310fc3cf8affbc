"""IsoLoCo: DiLoCo on pseudo-gradients whose matrices are made isotropic."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from fairseq_async.algorithms import BufferedNesterov
from fairseq_async.method.methods import RuleContext
from fairseq_async.options.config import LocalSGDOptions, OuterLearningRate, OuterMomentum


class IsoLoCoOptions(LocalSGDOptions):
    """``outer isoloco``: one Nesterov step on the workers' mean, each matrix with one singular value.

    The defaults are those of the authors' runs with 178 million parameters, 8 workers and 30 local steps.
    """

    outer: Literal["isoloco"] = "isoloco"
    outer_lr: OuterLearningRate = 1.8
    outer_momentum: OuterMomentum = 0.8


class IsoLoCo(BufferedNesterov):
    """IsoLoCo (Horoi et al. 2026, github.com/shoroi/isoloco, read on 29 November 2026).

    ::

        Δ ← mean of the workers' δ;  of a matrix Δ = U diag(s) Vᵀ:  Δ ← mean(s) · UVᵀ
        m ← βm + Δ;  θ ← θ − ε(βm + Δ)

    Every tensor of two dimensions is a matrix, embeddings among them, as in the authors' runs.

    Args:
        shapes: of the tensors, in the order of the flat parameters; the others as those of ``BufferedNesterov``.
    """

    def __init__(self, lr: float, momentum: float, workers: int, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(lr, momentum, workers)
        self.shapes = list(shapes)

    def _add(self, delta: Tensor) -> Tensor:
        """Adds an update; makes the sum of a whole round isotropic, which is that of the mean times their number."""
        total = super()._add(delta)
        if self.count >= self.buffer_size:
            for shape, part in zip(self.shapes, total.split([prod(each) for each in self.shapes]), strict=True):
                if len(shape) == 2 and part.numel():
                    left, values, right = torch.linalg.svd(part.view(shape), full_matrices=False)
                    part.copy_((values.mean() * left @ right).flatten())
        return total


def build(options: IsoLoCoOptions, context: RuleContext) -> IsoLoCo:
    """Builds the rule for the model of the context."""
    return IsoLoCo(options.outer_lr, options.outer_momentum, context.workers, context.shapes)
