"""Outer SGD on pseudo-gradients that are divided by the local steps, or the summed learning rate, that they are of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import Tensor

from fairseq_async.algorithms import NesterovMomentum, Update
from fairseq_async.algorithms.rule import State
from fairseq_async.method.methods import RuleContext
from fairseq_async.options.config import AsyncLocalSGDOptions, OuterLearningRate

if TYPE_CHECKING:
    from fairseq_async.simulation.schedule import LearningRate


class PerStepOptions(AsyncLocalSGDOptions):
    """``outer per_step``: one plain step per arrival, whose length does not depend on the number of local steps."""

    outer: Literal["per_step"] = "per_step"
    outer_lr: OuterLearningRate = 1.2
    divide_by: Literal["steps", "rate"] = Field(
        "steps", description="what an update is divided by: its local steps, or the sum of their learning rates"
    )
    warmup: int = Field(0, ge=0, description="of the workers' cosine schedule, with rate")
    minimum: float = Field(1.0, ge=0, le=1, description="the schedule's last rate, as a share of its peak, with rate")


class PerStep(NesterovMomentum):
    """θ ← θ − ε/k · H/x · δ, where x is the number of local steps, or the sum of their learning rates over the peak.

    Dividing by the summed rate is after AutoLoCo (arXiv 2609.36662), of which this project knows a summary alone. The
    sum is the number of steps times the mean of the schedule's rates at the worker's last update and at this one.

    Args:
        local_steps: H, of a whole round.
        rate: learning rate by progress, over its peak; None divides by the number of steps.
    """

    def __init__(self, lr: float, workers: int, local_steps: int, rate: LearningRate | None = None) -> None:
        super().__init__(lr, 0.0, workers)
        self.local_steps, self.rate = local_steps, rate
        self.progress, self.starts = 0.0, dict[int, float]()

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        start = self.starts.get(update.worker, 0.0)
        self.progress += update.weight / self.workers
        self.starts[update.worker] = self.progress
        mean = 1.0 if self.rate is None else (self.rate(start) + self.rate(self.progress)) / 2
        factor = self.local_steps / (update.weight * mean)
        return super().apply(parameters, replace(update, delta=update.delta * factor))

    def state_dict(self) -> State:
        return super().state_dict() | {"progress": self.progress, "starts": dict(self.starts)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.progress, self.starts = state["progress"], dict(state["starts"])


def build(options: PerStepOptions, context: RuleContext) -> PerStep:
    """Builds the rule for the run of the context; with ``rate`` the schedule ends with the run's ``total_steps``."""
    rate = None
    if options.divide_by == "rate":
        from fairseq_async.simulation.experiment import ScheduleOptions  # start-up time
        from fairseq_async.simulation.schedule import LearningRate

        schedule = ScheduleOptions(type="cosine", warmup=options.warmup, minimum=options.minimum)
        rate = LearningRate(schedule, 1.0, options.total_steps)
    return PerStep(options.outer_lr, context.workers, options.local_steps, rate)
