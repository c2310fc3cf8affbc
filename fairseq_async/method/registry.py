"""The registry of rules: each rule is registered once, with its options and a function that builds it from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import LocalSGDOptions, Section

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag is to be answered at once
    from fairseq_async.algorithms import Rule

LocalSGD = TypeVar("LocalSGD", bound=LocalSGDOptions)


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
