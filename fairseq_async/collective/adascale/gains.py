"""AdaScale's gains of a whole model and of its parameter groups."""

import math
from collections.abc import Iterator, Sequence
from typing import TypedDict

from fairseq_async.algorithms.adascale import AdaScaleGain, GainState


class GainsState(TypedDict):
    """What a checkpoint holds of :class:`Gains`."""

    whole: GainState
    groups: list[GainState]


class Gains:
    """One :class:`fairseq_async.algorithms.AdaScaleGain` for each parameter group, and one for all of them together.

    Args:
        groups: how many parameter groups there are.
        smoothing: θ of the averages, in place of the paper's.
    """

    def __init__(self, groups: int, smoothing: float | None = None) -> None:
        self.whole = AdaScaleGain(1.0, smoothing)
        self.groups = [AdaScaleGain(1.0, smoothing) for _ in range(groups)]

    def set_scale(self, scale: float) -> None:
        """Sets S of the next step."""
        for gain in self:
            gain.scale = scale

    def observe(
        self,
        square_norms: Sequence[float],
        gradients: int,
        mean_square_norms: Sequence[float],
        batches: float | None = None,
    ) -> None:
        """Adds a step's norms to the averages, unless one is NaN or Inf or there is no gradient.

        Args:
            square_norms: Σ|g_i|² of each parameter group.
            gradients: how many g_i there are, on all ranks together.
            mean_square_norms: |ḡ|² of each parameter group.
            batches: single batches in ḡ; by default S.
        """
        if not all(map(math.isfinite, (*square_norms, *mean_square_norms))):
            return
        squares, means = (sum(square_norms), *square_norms), (sum(mean_square_norms), *mean_square_norms)
        for gain, square, mean in zip(self, squares, means, strict=True):
            if square > 0:
                gain.observe(square, gradients, mean, batches)

    def state_dict(self) -> GainsState:
        """The averages and τ of the model and of each group."""
        return {"whole": self.whole.state_dict(), "groups": [gain.state_dict() for gain in self.groups]}

    def load_state_dict(self, state: GainsState) -> None:
        """Restores what :meth:`state_dict` returned."""
        for gain, saved in zip(self, (state["whole"], *state["groups"]), strict=True):
            gain.load_state_dict(saved)

    def __iter__(self) -> Iterator[AdaScaleGain]:
        return iter((self.whole, *self.groups))
