"""The registry of rules: each rule is registered once, with its options and a function that builds it from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, Options, Section

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag is to be answered at once
    import torch
    from torch import Tensor

    from fairseq_async.algorithms import Rule

LocalSGD = TypeVar("LocalSGD", bound=LocalSGDOptions)
Hybrid = TypeVar("Hybrid", bound=HybridOptions)


@dataclass(frozen=True)
class RuleContext:
    """The run and the model that an outer rule is built for.

    Attributes:
        workers: number of workers that were announced.
        sizes: number of elements of each tensor of the model, in the order of the flat parameters.
        names: names of these tensors.
    """

    workers: int
    sizes: Sequence[int] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class GradientRuleContext:
    """The run and the optimizer that a gradient rule is built for.

    Attributes:
        optimizer: the inner optimizer, over the server's flat parameters.
        clip_norm: largest L2 norm of the gradient of a step; 0 does not clip.
        tensors: views of the parameters, one for each tensor of the model; None where the optimizer has these views.
        workers: number of workers that were announced.
        elementwise: whether the optimizer steps each element independently of the others.
    """

    optimizer: torch.optim.Optimizer
    clip_norm: float
    tensors: Sequence[Tensor] | None
    workers: int
    elementwise: bool = False


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


@dataclass(frozen=True)
class GradientRule(Generic[Hybrid]):
    """A registered gradient rule, by which the server applies gradients: ``--optimizer hybrid_async --gradient-rule
    NAME``. Attributes as of :class:`OuterRule`."""

    name: str
    options: type[Hybrid]
    build: Callable[[Hybrid, GradientRuleContext], Rule]
    divisible: bool = False


OUTER_RULES: dict[str, OuterRule[LocalSGDOptions]] = {}
GRADIENT_RULES: dict[str, GradientRule[HybridOptions]] = {}


def register_outer_rule(rule: OuterRule[LocalSGD]) -> None:
    """Registers an outer rule under its name.

    Raises:
        ConfigurationError: the name is taken, or one of the rule's options has the name of an option of every method.
    """
    _check_new("outer rule", rule.name, rule.options, OUTER_RULES)
    OUTER_RULES[rule.name] = cast("OuterRule[LocalSGDOptions]", rule)


def register_gradient_rule(rule: GradientRule[Hybrid]) -> None:
    """Registers a gradient rule under its name; raises as :func:`register_outer_rule`."""
    _check_new("gradient rule", rule.name, rule.options, GRADIENT_RULES)
    GRADIENT_RULES[rule.name] = cast("GradientRule[HybridOptions]", rule)


def _check_new(kind: str, name: str, options: type[Options], known: Mapping[str, object]) -> None:
    if name in known:
        raise ConfigurationError(f"{kind} {name}: there is a rule of this name already")
    taken = sorted(set(options.model_fields) & set(Section.model_fields))
    if taken:
        raise ConfigurationError(f"{kind} {name}: {taken[0]} is the name of an option that every method has")
