"""A user's file that registers an outer rule and a gradient rule, each with an option of its own, each by one call.

The tests copy it elsewhere, and name it by ``FAIRSEQ_ASYNC_PLUGINS``.
"""

from fairseq_async.config import AsyncLocalSGDOptions, HybridOptions
from fairseq_async.methods import (
    GradientRule,
    GradientRuleContext,
    OuterRule,
    RuleContext,
    register_gradient_rule,
    register_outer_rule,
)
from pydantic import Field

from fairseq_async.algorithms import HybridAccumulation, NesterovMomentum, Update


class ShrinkingOptions(AsyncLocalSGDOptions):
    shrink: float = Field(0.5, gt=0, le=1, description="factor of every update")


class Shrinking(NesterovMomentum):
    """θ ← θ − shrink·δ"""

    def __init__(self, shrink: float) -> None:
        super().__init__(lr=shrink, momentum=0.0, workers=1)


def build_shrinking(options: ShrinkingOptions, context: RuleContext) -> Shrinking:
    assert context.workers >= 1 and sum(context.sizes) > 0
    print(f"built with {options.shrink}", flush=True)  # for the test: which process builds it
    return Shrinking(options.shrink)


class CappedOptions(HybridOptions):
    cap: float = Field(1.0, gt=0, description="largest magnitude of an element of a gradient")


class Capped(HybridAccumulation):
    """Clips every element of a gradient before it is added."""

    def __init__(self, options: CappedOptions, context: GradientRuleContext) -> None:
        updates = options.updates_per_step or context.workers
        super().__init__(context.optimizer, updates, context.clip_norm, context.tensors)
        self.cap = options.cap
        print(f"built with {options.cap}", flush=True)

    def apply(self, parameters, update: Update) -> bool:  # type: ignore[no-untyped-def]
        update.delta.clamp_(-self.cap, self.cap)
        return super().apply(parameters, update)


register_outer_rule(OuterRule("shrinking", ShrinkingOptions, build_shrinking))
register_gradient_rule(GradientRule("capped", CappedOptions, Capped))
