"""AdaScale's gains of a whole model and of its parameter groups."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from fairseq_async.algorithms.adascale import AdaScaleGain, GainState


class GainsState(TypedDict):
    """The state of :class:`Gains` in a checkpoint."""

    whole: GainState
    groups: list[GainState]


@dataclass(frozen=True)
class _Observed:
    """The norms of a step: those of the whole model first, then those of each group."""

    square_norms: Sequence[float]
    mean_square_norms: Sequence[float]
    gradients: int
    batches: float | None


class Gains:
    """One :class:`fairseq_async.algorithms.AdaScaleGain` for each parameter group, and one for all of them together.

    The norms of a step are added to the averages when the step is taken, so its gain follows from earlier steps.

    Args:
        groups: number of parameter groups.
        smoothing: θ of the averages, in place of the paper's.
    """

    def __init__(self, groups: int, smoothing: float | None = None) -> None:
        self.whole = AdaScaleGain(1.0, smoothing)
        self.groups = [AdaScaleGain(1.0, smoothing) for _ in range(groups)]
        self._observed: _Observed | None = None

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
        """Takes a step's norms, unless one is NaN or Inf; :meth:`advance` adds them to the averages.

        Args:
            square_norms: Σ|g_i|² of each parameter group.
            gradients: number of g_i, on all ranks together.
            mean_square_norms: |ḡ|² of each parameter group.
            batches: number of single batches in ḡ; by default S.
        """
        if all(map(math.isfinite, (*square_norms, *mean_square_norms))):
            squares, means = (sum(square_norms), *square_norms), (sum(mean_square_norms), *mean_square_norms)
            self._observed = _Observed(squares, means, gradients, batches)

    def discard(self) -> None:
        """Forgets the norms of a step that is not taken."""
        self._observed = None

    def advance(self) -> float:
        """Counts a step that was taken; returns the gain of the whole model in this step."""
        step = self.whole.advance()
        if (seen := self._observed) is not None:
            for gain, square, mean in zip(self, seen.square_norms, seen.mean_square_norms, strict=True):
                if square > 0:  # there was a gradient
                    gain.observe(square, seen.gradients, mean, seen.batches)
        self.discard()
        return step

    def state_dict(self) -> GainsState:
        """Returns the averages and τ of the model and of each group."""
        return {"whole": self.whole.state_dict(), "groups": [gain.state_dict() for gain in self.groups]}

    def load_state_dict(self, state: GainsState) -> None:
        """Restores what :meth:`state_dict` returned."""
        for gain, saved in zip(self, (state["whole"], *state["groups"]), strict=True):
            gain.load_state_dict(saved)

    def __iter__(self) -> Iterator[AdaScaleGain]:
        return iter((self.whole, *self.groups))
