"""A user's file that registers an outer rule with an option of its own by one call.

The tests copy it elsewhere, and name it by ``FAIRSEQ_ASYNC_PLUGINS``.
"""

from fairseq_async.config import AsyncLocalSGDOptions
from fairseq_async.methods import (
    OuterRule,
    RuleContext,
    register_outer_rule,
)
from pydantic import Field

from fairseq_async.algorithms import NesterovMomentum


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


register_outer_rule(OuterRule("shrinking", ShrinkingOptions, build_shrinking))
