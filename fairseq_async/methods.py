"""The registry of methods: each rule is registered once, with its options and with what the server builds of them.

A rule of one's own is a file that calls :func:`register_outer_rule` or :func:`register_gradient_rule`; the environment
variable ``FAIRSEQ_ASYNC_PLUGINS`` names it, for every process of a run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fairseq_async.config import (
    AdaScaleOptions,
    AdasumOptions,
    BufferedNesterovOptions,
    DelayedNesterovOptions,
    DiLoCoOptions,
    HybridOptions,
    LocalSGDOptions,
    NesterovOptions,
    Options,
    OuterSGDOptions,
    Section,
)
from fairseq_async.environment import PLUGINS
from fairseq_async.errors import ConfigurationError
from fairseq_async.validation import Spell, checked

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag is to be answered at once
    import torch
    from torch import Tensor

    from fairseq_async.algorithms import Rule

MethodOptions = LocalSGDOptions | HybridOptions | AdasumOptions | AdaScaleOptions
METHODS: dict[str, type[MethodOptions]] = {
    "local_sgd": LocalSGDOptions,
    "hybrid_async": HybridOptions,
    "adasum": AdasumOptions,
    "adascale": AdaScaleOptions,
}
SYNCHRONOUS = ("adasum", "adascale")  # the ranks of one data-parallel group; no server
LocalSGD = TypeVar("LocalSGD", bound=LocalSGDOptions)
Hybrid = TypeVar("Hybrid", bound=HybridOptions)
_Options = TypeVar("_Options", bound=Options)


@dataclass(frozen=True)
class RuleContext:
    """What an outer rule is built for.

    Attributes:
        workers: number of workers that were announced.
        sizes: number of elements of each tensor of the model, in the order of the flat parameters.
    """

    workers: int
    sizes: Sequence[int] = ()


@dataclass(frozen=True)
class GradientRuleContext:
    """What a gradient rule is built for.

    Attributes:
        optimizer: the inner optimizer, over the server's flat parameters.
        clip_norm: largest L2 norm of a gradient that is stepped with; 0 does not clip.
        tensors: views of the parameters, one for each tensor of the model; None where the optimizer has these.
        workers: number of workers that were announced.
        elementwise: the optimizer takes each element by itself.
    """

    optimizer: torch.optim.Optimizer
    clip_norm: float
    tensors: Sequence[Tensor] | None
    workers: int
    elementwise: bool = False


@dataclass(frozen=True)
class OuterRule(Generic[LocalSGD]):
    """What the server does with pseudo-gradients: ``--optimizer local_sgd --outer NAME``.

    Attributes:
        options: the rule's options; each becomes a flag, a JSON key and a key of the simulator.
        build: makes the rule; the options that depend on the number of workers are filled in.
        synchronous: all workers wait for each other.
    """

    name: str
    options: type[LocalSGD]
    build: Callable[[LocalSGD, RuleContext], Rule]
    synchronous: bool = False


@dataclass(frozen=True)
class GradientRule(Generic[Hybrid]):
    """What the server does with gradients: ``--optimizer hybrid_async --gradient-rule NAME``. As :class:`OuterRule`."""

    name: str
    options: type[Hybrid]
    build: Callable[[Hybrid, GradientRuleContext], Rule]


_outer: dict[str, OuterRule[LocalSGDOptions]] = {}
_gradient: dict[str, GradientRule[HybridOptions]] = {}


def register_outer_rule(rule: OuterRule[LocalSGD]) -> None:
    """Makes a rule known under its name.

    Raises:
        ConfigurationError: the name is taken, or one of its options has the name of an option of every method.
    """
    _check_new("outer rule", rule.name, rule.options, _outer)
    _outer[rule.name] = cast("OuterRule[LocalSGDOptions]", rule)


def register_gradient_rule(rule: GradientRule[Hybrid]) -> None:
    """As :func:`register_outer_rule`."""
    _check_new("gradient rule", rule.name, rule.options, _gradient)
    _gradient[rule.name] = cast("GradientRule[HybridOptions]", rule)


def outer_rules() -> Mapping[str, OuterRule[LocalSGDOptions]]:
    """All outer rules by name, in the order in which they were registered."""
    _import_plugins()
    return _outer


def gradient_rules() -> Mapping[str, GradientRule[HybridOptions]]:
    """All gradient rules by name."""
    _import_plugins()
    return _gradient


def outer_rule(name: str) -> OuterRule[LocalSGDOptions]:
    """
    Raises:
        ConfigurationError: there is no rule of this name.
    """
    return _named("outer", name, outer_rules())


def gradient_rule(name: str) -> GradientRule[HybridOptions]:
    """As :func:`outer_rule`."""
    return _named("gradient_rule", name, gradient_rules())


def models(method: str) -> Mapping[str, type[Options]]:
    """The models of a method's options, by the name of their rule; a method without rules has one."""
    match method:
        case "local_sgd":
            return {name: rule.options for name, rule in outer_rules().items()}
        case "hybrid_async":
            return {name: rule.options for name, rule in gradient_rules().items()}
    return {"": METHODS[method]}


_RULE_KEYS = {"local_sgd": "outer", "hybrid_async": "gradient_rule"}


def rule_key(method: str) -> str | None:
    """The option that names a method's rule; None for a method without rules."""
    return _RULE_KEYS.get(method)


def default_rule(method: str) -> str:
    """The rule of a method where none is named."""
    return str(METHODS[method].model_fields[_RULE_KEYS[method]].default)


def parse(base: type[_Options], values: Mapping[str, object], where: str, spell: Spell = '"{}"'.format) -> _Options:
    """The options of a method from flags or keys, as the model of the rule that they name.

    Args:
        base: what the models of the method's rules extend; one of :data:`METHODS`.
        where: what to name in an error.
        spell: how a key is written there.

    Raises:
        ConfigurationError: an unknown rule or key, a bad value, or an option that only other rules have.
    """
    method = str(base.model_fields["method"].default)
    known, key = models(method), rule_key(method)
    if key is None:
        return checked(base, values, where, spell)
    name = values.get(key, default_rule(method))
    if not isinstance(name, str) or name not in known:
        raise ConfigurationError(f"{where}: {spell(key)}: Input should be {_one_of(list(known))} (it is {name!r})")
    of_others = {field for model in known.values() for field in model.model_fields} - set(known[name].model_fields)
    given = {option: value for option, value in values.items() if option not in of_others}
    options = checked(cast("type[_Options]", known[name]), given | {key: name}, where, spell)
    for option in values:
        if option in of_others and values[option]:
            raise ConfigurationError(f"{where}: {option} is of no use with {key} {name}: leave it out")
    return options


_Rule = TypeVar("_Rule")


def _named(key: str, name: str, rules: Mapping[str, _Rule]) -> _Rule:
    if name not in rules:
        raise ConfigurationError(f"{key} {name}: there is no such rule; there are {', '.join(rules)}")
    return rules[name]


def _one_of(names: Sequence[str]) -> str:
    """The names as pydantic lists what is allowed."""
    quoted = [repr(name) for name in names]
    return " or ".join(part for part in (", ".join(quoted[:-1]), quoted[-1]) if part)


def _check_new(kind: str, name: str, options: type[Options], known: Mapping[str, object]) -> None:
    if name in known:
        raise ConfigurationError(f"{kind} {name}: there is a rule of this name already")
    taken = sorted(set(options.model_fields) & set(Section.model_fields))
    if taken:
        raise ConfigurationError(f"{kind} {name}: {taken[0]} is the name of an option that every method has")


_imported: set[str] = set()


def _import_plugins() -> None:
    """Imports what ``FAIRSEQ_ASYNC_PLUGINS`` names, each file or module once in this process.

    Raises:
        ConfigurationError: one of them cannot be imported.
    """
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        if name not in _imported:
            _imported.add(name)  # before it is imported: it may ask for the rules that there are
            try:
                _import_plugin(name)
            except Exception as error:  # whatever goes wrong in a file that is not ours
                _imported.discard(name)
                said = " ".join(f"{type(error).__name__}: {error}".split())
                raise ConfigurationError(f"{PLUGINS}: {name} cannot be imported: {said}") from error


def _import_plugin(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None  # it ends in .py
    module = sys.modules[path.stem] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)


# The rules of this package. They import their algorithms when they are built, for the sake of start-up time: torch.


def _diloco(options: DiLoCoOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import BufferedNesterov  # start-up time

    return BufferedNesterov(options.outer_lr, options.outer_momentum, context.workers)


def _nesterov(options: NesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import NesterovMomentum  # start-up time

    return NesterovMomentum(options.outer_lr, options.outer_momentum, context.workers)


def _buffered_nesterov(options: BufferedNesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import BufferedNesterov  # start-up time

    return BufferedNesterov(options.outer_lr, options.outer_momentum, options.buffer_size or context.workers)


def _delayed_nesterov(options: DelayedNesterovOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import DelayedNesterov  # start-up time

    return DelayedNesterov(options.outer_lr, options.outer_momentum, options.delay or context.workers, options.c)


def _sgd(options: OuterSGDOptions, context: RuleContext) -> Rule:
    from fairseq_async.algorithms import NesterovMomentum  # start-up time

    return NesterovMomentum(options.outer_lr, 0.0, context.workers)


def _accumulation(options: HybridOptions, context: GradientRuleContext) -> Rule:
    from fairseq_async.algorithms import HybridAccumulation  # start-up time

    whole_step = options.updates_per_step or context.workers
    return HybridAccumulation(
        context.optimizer,
        whole_step,
        context.clip_norm,
        context.tensors,
        partial_steps=options.closes_early,
        elementwise=context.elementwise,
    )


register_outer_rule(OuterRule("diloco", DiLoCoOptions, _diloco, synchronous=True))
register_outer_rule(OuterRule("nesterov", NesterovOptions, _nesterov))
register_outer_rule(OuterRule("buffered_nesterov", BufferedNesterovOptions, _buffered_nesterov))
register_outer_rule(OuterRule("delayed_nesterov", DelayedNesterovOptions, _delayed_nesterov))
register_outer_rule(OuterRule("sgd", OuterSGDOptions, _sgd))
register_gradient_rule(GradientRule("accumulation", HybridOptions, _accumulation))
