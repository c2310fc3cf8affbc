"""The registry of rules: each rule is registered once, with its options and a function that builds it from them.

The classes of this package's rules are imported when one is built: torch takes seconds to import, and a wrong flag is
to be answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fairseq_async.errors import ConfigurationError
from fairseq_async.options import config
from fairseq_async.options.config import LocalSGDOptions, Section

if TYPE_CHECKING:
    from fairseq_async.algorithms import Rule

LocalSGD = TypeVar("LocalSGD", bound=LocalSGDOptions)


@dataclass(frozen=True)
class RuleContext:
    """The run and the model that an outer rule is built for.

    Attributes:
        workers: number of workers that were announced.
        sizes: number of elements of each tensor of the model, in the order of the flat parameters.
        names: names of these tensors.
        shapes: shapes of these tensors; a matrix has two dimensions.
    """

    workers: int
    sizes: Sequence[int] = ()
    names: Sequence[str] = ()
    shapes: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True)
class OuterRule(Generic[LocalSGD]):
    """A registered outer rule, by which the server applies pseudo-gradients: ``--optimizer local_sgd --outer NAME``.

    Attributes:
        options: model of the rule's options; each becomes a flag, a JSON key and a key of the simulator.
        build: makes the rule; the options that depend on the number of workers are filled in.
        synchronous: whether all workers wait for each other.
        divisible: whether a server in shards may have the rule: each shard has one, for its own whole tensors. So the
            rule changes a tensor by nothing that other tensors, or their number, decide.

    A model of options with ``quorum`` makes rounds: the grace period of each begins with so many updates, and all
    updates of a round are one step of the rule.
    """

    name: str
    options: type[LocalSGD]
    build: Callable[[LocalSGD, RuleContext], Rule]
    synchronous: bool = False
    divisible: bool = False


OUTER_RULES: dict[str, OuterRule[LocalSGDOptions]] = {}


def register_outer_rule(rule: OuterRule[LocalSGD]) -> None:
    """Registers an outer rule under its name.

    Raises:
        ConfigurationError: the name is taken, or one of the rule's options has the name of an option of every method.
    """
    if rule.name in OUTER_RULES:
        raise ConfigurationError(f"outer rule {rule.name}: there is a rule of this name already")
    taken = sorted(set(rule.options.model_fields) & set(Section.model_fields))
    if taken:
        raise ConfigurationError(f"outer rule {rule.name}: {taken[0]} is the name of an option that every method has")
    OUTER_RULES[rule.name] = cast("OuterRule[LocalSGDOptions]", rule)


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
    "mla": (config.MomentumLookAheadOptions, _builder("MomentumLookAhead", *_MOMENTUM, "start_ahead")),
    "heloco": (config.HeLoCoOptions, _builder("HeLoCo", *_MOMENTUM, "workers", "sizes", "start_ahead")),
}
for _name, (_options, _build) in _RULES.items():
    register_outer_rule(OuterRule(_name, _options, _build, synchronous=_name == "diloco", divisible=True))
