"""AdaScale: the gain, by which a step on S batches may be longer than a step on one batch."""

import math
from collections.abc import Sequence
from typing import TypedDict

SMALLEST_VARIANCE = 1e-6


class GainState(TypedDict):
    """The state of an :class:`AdaScaleGain` in a checkpoint."""

    variance: float
    square_mean: float
    estimates: int
    scale_invariant_steps: float


class AdaScaleGain:
    """The gain of AdaScale: how many single-batch steps a step on S batches is worth.

    Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (arXiv 2007.05105). Each
    iteration has the gradients g_i of S batches and their mean ḡ::

        σ̂² = Σ|g_i|²/(S−1) − S/(S−1)·|ḡ|²                (at least 1e-6)
        μ̂² = |ḡ|² − σ̂²/S                                  (at least 0; with σ̂² before it is bounded)
        r  = (σ² + μ²) / (σ²/S + μ²)   in [1, S]
        step size = r · lr(⌊τ⌋);  τ ← τ + r;  stop at τ ≥ T

    lr(·) and T are the learning-rate schedule and the number of steps of the run with one batch in a step. The momentum
    does not change with S. σ² and μ² are averages of the estimates of earlier iterations, so that a gain does not
    depend on the noise of the gradient that it multiplies; r₀ = 1. The averages are exponential with
    θ = max(1 − S/1000, 0), and plain means while t < 1/(1 − θ).

    The caller computes the norms. σ² and μ² describe single batches, so ``scale`` may change at any time, also after a
    state is loaded.

    Args:
        scale: S, the number of single batches in one step; at least 1.
        smoothing: θ in [0, 1); by default the paper's.

    Attributes:
        variance: σ², the average variance of a single batch's gradient.
        square_mean: μ², the average squared norm of the expected gradient.
        estimates: t, the number of estimates in the averages.
        scale_invariant_steps: τ, the number of single-batch steps that all steps so far are worth.

    Raises:
        ValueError: S below 1, or θ out of its range.
    """

    def __init__(self, scale: float, smoothing: float | None = None) -> None:
        if smoothing is not None and not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing}; it must be at least 0 and below 1")
        self.scale = scale
        self._smoothing = smoothing
        self.variance = 0.0
        self.square_mean = 0.0
        self.estimates = 0
        self.scale_invariant_steps = 0.0

    @property
    def scale(self) -> float:
        """S, the number of single batches in one step."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if not 1 <= value < math.inf:
            raise ValueError(f"scale is {value}; it must be at least 1")
        self._scale = value

    @property
    def smoothing(self) -> float:
        """θ, the decay of the averages."""
        return max(1 - self.scale / 1000, 0.0) if self._smoothing is None else self._smoothing

    @property
    def gain(self) -> float:
        """r, the gain of the next iteration, in [1, S]."""
        if not self.estimates:
            return 1.0
        r = (self.variance + self.square_mean) / (self.variance / self.scale + self.square_mean)
        return min(max(r, 1.0), self.scale)  # outside the interval only by rounding

    @property
    def noise_scale(self) -> float:
        """φ = σ²/μ² in single batches (Qiao et al. 2021, Pollux, arXiv 2008.12260); NaN before the first estimate.

        φ is the number of batches at which noise and signal are equal: r = S·(φ + 1)/(φ + S), so more than a few φ
        batches in a step hardly help.
        """
        if not self.estimates:
            return math.nan
        return self.variance / self.square_mean if self.square_mean > 0 else math.inf

    def update(self, local_square_norms: Sequence[float], mean_square_norm: float) -> float:
        """Counts one iteration: advances τ by its gain, and adds its estimates to the averages for later iterations.

        Args:
            local_square_norms: |g_i|² of at least two gradients, each the mean over an equal share of the S batches: S
                gradients of one batch each, or fewer gradients of several batches each. With S = 1 one is enough.
            mean_square_norm: |ḡ|².

        Returns:
            r, the gain of this iteration.

        Raises:
            ValueError: a norm is negative, infinite or NaN, or there is one gradient where S is above 1.
        """
        if not all(0 <= norm < math.inf for norm in [*local_square_norms, mean_square_norm]):
            found = f"{list(local_square_norms)} and {mean_square_norm}"
            raise ValueError(f"square norms {found}: must be finite and not negative")
        gain = self.gain
        if len(local_square_norms) > 1 or self.scale > 1:
            self.observe(sum(local_square_norms), len(local_square_norms), mean_square_norm)
        self.scale_invariant_steps += gain
        return gain

    def observe(
        self, square_norms: float, gradients: int, mean_square_norm: float, batches: float | None = None
    ) -> None:
        """Adds one estimate of σ² and μ² to the averages. To be called after the same iteration's gain is read.

        Args:
            square_norms: Σ|g_i|².
            gradients: number of gradients g_i, at least two.
            mean_square_norm: |ḡ|².
            batches: number of single batches in ḡ; by default S. Each g_i is the mean of ``batches / gradients`` ones.

        Raises:
            ValueError: there is one gradient, or a square norm is negative, infinite or NaN.
        """
        if gradients < 2:
            raise ValueError(f"{gradients} gradient in an iteration of scale {self.scale:g}; noise shows from two on")
        if not (0 <= square_norms < math.inf and 0 <= mean_square_norm < math.inf):
            raise ValueError(f"square norms {square_norms} and {mean_square_norm}: must be finite and not negative")
        batches = self.scale if batches is None else batches
        of_one = (square_norms - gradients * mean_square_norm) / (gradients - 1)  # the variance of one g_i
        self.estimates += 1
        weight = max(1 / self.estimates, 1 - self.smoothing)
        self.variance += weight * (max(of_one * batches / gradients, SMALLEST_VARIANCE) - self.variance)
        self.square_mean += weight * (max(mean_square_norm - of_one / gradients, 0.0) - self.square_mean)

    def advance(self) -> float:
        """Advances τ ← τ + r, and returns r."""
        self.scale_invariant_steps += self.gain
        return self.gain

    def state_dict(self) -> GainState:
        """Returns the averages and τ. Scale and smoothing are not in it: they are settings of the run that loads it."""
        return {
            "variance": self.variance,
            "square_mean": self.square_mean,
            "estimates": self.estimates,
            "scale_invariant_steps": self.scale_invariant_steps,
        }

    def load_state_dict(self, state: GainState) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.variance, self.square_mean = state["variance"], state["square_mean"]
        self.estimates, self.scale_invariant_steps = state["estimates"], state["scale_invariant_steps"]
