"""The options of outer rules that are newer than Liu et al. 2024, and of rules that this paper compares with."""

from typing import Literal

from pydantic import Field

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.options.config import AsyncLocalSGDOptions, LookAheadDispatch, OuterLearningRate, OuterMomentum


class MomentumLookAheadOptions(AsyncLocalSGDOptions):
    """``outer mla``: one step with an averaged momentum per arrival; workers start ahead along the momentum."""

    outer: Literal["mla"] = "mla"
    outer_lr: OuterLearningRate = 0.3  # at the paper's 0.7 five workers diverge where one is six times faster
    outer_momentum: OuterMomentum = 0.9
    look_ahead: LookAheadDispatch = True


class HeLoCoOptions(AsyncLocalSGDOptions):
    """``outer heloco``: MLA on updates that are turned towards the momentum, tensor by tensor."""

    outer: Literal["heloco"] = "heloco"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    look_ahead: LookAheadDispatch = True


class DirectionAveragingOptions(AsyncLocalSGDOptions):
    """``outer direction_averaging``: one Nesterov step on the updates of a round, whose lengths and directions are
    averaged separately. A round takes the updates that come until the grace period after the K-th ends."""

    outer: Literal["direction_averaging"] = "direction_averaging"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    look_ahead: LookAheadDispatch = False
    quorum: int = Field(1, ge=1, description="updates K with which a round's grace period begins")

    def for_workers(self, workers: int) -> "DirectionAveragingOptions":
        if self.quorum > workers:
            raise ConfigurationError(
                f"{option('quorum')} is {self.quorum}: there are only {workers} workers; give at most {workers}"
            )
        return self


class HeavyBallOptions(AsyncLocalSGDOptions):
    """``outer heavy_ball``: one step with Polyak's momentum per arrival."""

    outer: Literal["heavy_ball"] = "heavy_ball"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    look_ahead: LookAheadDispatch = False


class OuterAdamOptions(AsyncLocalSGDOptions):
    """``outer adam``: one step of Adam per arrival, with β₂ 0.999 and ε 1e-8."""

    outer: Literal["adam"] = "adam"
    outer_lr: OuterLearningRate = 1e-3
    outer_momentum: OuterMomentum = 0.9


class OuterAdamWOptions(AsyncLocalSGDOptions):
    """``outer adamw``: as ``outer adam``, with decoupled weight decay."""

    outer: Literal["adamw"] = "adamw"
    outer_lr: OuterLearningRate = 1e-3
    outer_momentum: OuterMomentum = 0.9
    outer_weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of the outer optimizer")
