"""Server rules that only a simulation needs: its learning rate, and synchronous ranks of one process."""

from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import AdaScaleGain, HybridAccumulation, Update, adasum
from fairseq_async.server import Layout
from fairseq_async.simulation.schedule import LearningRate, set_lr


class ScheduledSteps(HybridAccumulation):
    """Hybrid accumulation whose learning rate follows the run's progress.

    Args:
        progress_per_step: mean gradients of a worker that a step stands for: N/k.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, updates_per_step: int, clip_norm: float, rate: LearningRate,
        progress_per_step: float,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, updates_per_step, clip_norm)
        self.rate, self.progress_per_step, self.steps = rate, progress_per_step, 0

    @property
    def learning_rate(self) -> float:
        return self.rate(self.steps * self.progress_per_step)

    def begin_epoch(self, epoch: int) -> None:
        """The rate follows steps."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """The rate follows steps."""

    def apply(self, parameters: Tensor, update: Update) -> bool:
        set_lr(self.optimizer, self.learning_rate)
        stepped = super().apply(parameters, update)
        self.steps += stepped
        return stepped

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]


class AdaScaleSteps(ScheduledSteps):
    """AdaScale SGD: each step is r times as large, r from the gradients that are summed; the schedule follows τ.

    Args:
        smoothing: θ in place of the paper's.
        last: the run is over at this τ.
    """

    def __init__(self, *args: Any, smoothing: float | None, last: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = AdaScaleGain(self.updates_per_step, smoothing)
        self.last = last
        self._square_norms: list[float] = []
        self._rate = 0.0

    @property
    def learning_rate(self) -> float:
        return self._rate

    @property
    def finished(self) -> bool:
        return self.gain.scale_invariant_steps >= self.last

    def apply(self, parameters: Tensor, update: Update) -> bool:
        self._square_norms.append(_square_norm(update.delta))
        if self.changes():
            progress = int(self.gain.scale_invariant_steps)
            gain = self.gain.update(self._square_norms, _square_norm(self._mean_with(update)))
            self._rate, self._square_norms = gain * self.rate(progress), []
        return super().apply(parameters, update)

    def _mean_with(self, update: Update) -> Tensor:
        if self.mean is None or not self.count:
            return update.delta
        return self.mean.lerp(update.delta, update.weight / (self.weight + update.weight))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"gain": self.gain.state_dict(), "square_norms": self._square_norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.gain.load_state_dict(state["gain"])
        self._square_norms = list(state["square_norms"])


def _square_norm(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


class AdasumOfRanks:
    """θ ← θ − Adasum(δ₁ … δ_k), tensor by tensor, of the k ranks of a round.

    Keeps the deltas of a round until it is complete; they must not be overwritten before.
    """

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.layout, self.ranks = layout, ranks
        self._deltas: list[Tensor] = []

    def apply(self, parameters: Tensor, update: Update) -> bool:
        self._deltas.append(update.delta)
        if len(self._deltas) < self.ranks:
            return False
        views = [list(self.layout.views(delta)) for delta in self._deltas]
        for parameter, tensors in zip(self.layout.views(parameters), zip(*views, strict=True), strict=True):
            parameter.sub_(adasum(tensors))
        self._deltas = []
        return True

    def changes(self, ahead: int = 0) -> bool:
        return (len(self._deltas) + ahead + 1) % self.ranks == 0

    @property
    def direction(self) -> None:
        return None

    def limit_round(self, updates: int) -> None:
        """Ranks are synchronous: all of them, or none."""

    def state_dict(self) -> dict[str, Any]:
        """Between two rounds there is nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing was kept."""
