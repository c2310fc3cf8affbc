"""The options of outer rules that are newer than Liu et al. 2024."""

from typing import Literal

from fairseq_async.options.config import AsyncLocalSGDOptions, OuterLearningRate, OuterMomentum, StartAhead


class MomentumLookAheadOptions(AsyncLocalSGDOptions):
    """``outer mla``: one step with an averaged momentum per arrival; workers start ahead along the momentum."""

    outer: Literal["mla"] = "mla"
    outer_lr: OuterLearningRate = 0.3  # at the paper's 0.7 five workers diverge where one is six times faster
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = True


class HeLoCoOptions(AsyncLocalSGDOptions):
    """``outer heloco``: MLA on updates that are turned towards the momentum, tensor by tensor."""

    outer: Literal["heloco"] = "heloco"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = True
