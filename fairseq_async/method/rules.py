"""Registers the rules of this package. Their classes are imported when a rule is built: torch takes seconds to import,
and a wrong flag is to be answered at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fairseq_async.method.registry import (
    OUTER_RULES,
    OuterRule,
    RuleContext,
    register_outer_rule,
)
from fairseq_async.options import config, outer
from fairseq_async.options.config import LocalSGDOptions

if TYPE_CHECKING:
    from fairseq_async.algorithms import Rule

__all__ = ["OUTER_RULES"]


def _builder(name: str, *given: str | float) -> Callable[[LocalSGDOptions, RuleContext], Rule]:
    """Returns a function that builds a rule of :mod:`fairseq_async.algorithms`.

    Args:
        name: the rule's class.
        given: its arguments: numbers, or names of the options, or of what the context has, that are passed.
    """

    def build(options: LocalSGDOptions, context: RuleContext) -> Rule:
        from fairseq_async import algorithms  # start-up time

        known = {**vars(context), **dict(options.for_workers(context.workers))}
        rule: Rule = getattr(algorithms, name)(*(known[each] if isinstance(each, str) else each for each in given))
        return rule

    return build


_MOMENTUM = ("outer_lr", "outer_momentum")
_RULES: dict[str, tuple[type[LocalSGDOptions], Callable[[LocalSGDOptions, RuleContext], Rule]]] = {
    "diloco": (config.DiLoCoOptions, _builder("BufferedNesterov", *_MOMENTUM, "workers")),
    "nesterov": (config.NesterovOptions, _builder("NesterovMomentum", *_MOMENTUM, "workers", "start_ahead")),
    "buffered_nesterov": (
        config.BufferedNesterovOptions,
        _builder("BufferedNesterov", *_MOMENTUM, "delay", "start_ahead"),
    ),
    "delayed_nesterov": (
        config.DelayedNesterovOptions,
        _builder("DelayedNesterov", *_MOMENTUM, "delay", "c", "start_ahead"),
    ),
    "sgd": (config.OuterSGDOptions, _builder("NesterovMomentum", "outer_lr", 0.0, "workers")),
    "mla": (outer.MomentumLookAheadOptions, _builder("MomentumLookAhead", *_MOMENTUM, "start_ahead")),
    "heloco": (outer.HeLoCoOptions, _builder("HeLoCo", *_MOMENTUM, "workers", "sizes", "start_ahead")),
}
for _name, (_options, _build) in _RULES.items():
    register_outer_rule(OuterRule(_name, _options, _build, synchronous=_name == "diloco", divisible=True))
