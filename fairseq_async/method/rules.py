"""Registers the rules of this package, each with a function that builds it from its options. The algorithms are
imported only when a rule is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairseq_async.method.registry import (
    OUTER_RULES,
    OuterRule,
    RuleContext,
    register_outer_rule,
)
from fairseq_async.options.config import (
    BufferedNesterovOptions,
    DelayedNesterovOptions,
    DiLoCoOptions,
    NesterovOptions,
    OuterSGDOptions,
)
from fairseq_async.options.outer import (
    HeLoCoOptions,
    MomentumLookAheadOptions,
)

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag is to be answered at once
    from fairseq_async.algorithms import Rule

__all__ = ["OUTER_RULES"]


def _diloco(options: DiLoCoOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import BufferedNesterov  # start-up time

    return BufferedNesterov(options.outer_lr, options.outer_momentum, context.workers)


def _nesterov(options: NesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import NesterovMomentum  # start-up time

    return NesterovMomentum(options.outer_lr, options.outer_momentum, context.workers, options.start_ahead)


def _buffered_nesterov(options: BufferedNesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import BufferedNesterov  # start-up time

    size = options.buffer_size or context.workers
    return BufferedNesterov(options.outer_lr, options.outer_momentum, size, options.start_ahead)


def _delayed_nesterov(options: DelayedNesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import DelayedNesterov  # start-up time

    delay = options.delay or context.workers
    return DelayedNesterov(options.outer_lr, options.outer_momentum, delay, options.c, options.start_ahead)


def _sgd(options: OuterSGDOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import NesterovMomentum  # start-up time

    return NesterovMomentum(options.outer_lr, 0.0, context.workers)


def _mla(options: MomentumLookAheadOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import MomentumLookAhead  # start-up time

    return MomentumLookAhead(options.outer_lr, options.outer_momentum, options.start_ahead)


def _heloco(options: HeLoCoOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import HeLoCo  # start-up time

    return HeLoCo(options.outer_lr, options.outer_momentum, context.workers, context.sizes, options.start_ahead)


register_outer_rule(OuterRule("diloco", DiLoCoOptions, _diloco, synchronous=True, divisible=True))
register_outer_rule(OuterRule("nesterov", NesterovOptions, _nesterov, divisible=True))
register_outer_rule(OuterRule("buffered_nesterov", BufferedNesterovOptions, _buffered_nesterov, divisible=True))
register_outer_rule(OuterRule("delayed_nesterov", DelayedNesterovOptions, _delayed_nesterov, divisible=True))
register_outer_rule(OuterRule("sgd", OuterSGDOptions, _sgd, divisible=True))
register_outer_rule(OuterRule("mla", MomentumLookAheadOptions, _mla, divisible=True))
register_outer_rule(OuterRule("heloco", HeLoCoOptions, _heloco, divisible=True))
