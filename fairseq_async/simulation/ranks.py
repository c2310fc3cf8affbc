"""The registry of methods that only simulations have, each in a file that ``FAIRSEQ_ASYNC_PLUGINS`` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:  # torch takes seconds to import, and a mistake in an experiment is to be answered at once
    from fairseq_async.algorithms import Rule


@dataclass(frozen=True)
class TwoRounds:
    """Bytes of one worker's update that goes to the server in two rounds, with headers.

    Attributes:
        first: bytes that go to the server in the first round.
        asked: bytes that come back, which say what the server wants in the second round.
        second: bytes that go to the server in the second round.
    """

    first: int
    asked: int
    second: int


@dataclass(frozen=True)
class RanksMethod:
    """A method of synchronous ranks: ``method: NAME`` in an experiment.

    Attributes:
        options: model of the method's keys.
        build: makes the rule from its options, the rule that steps with one gradient, the number of workers and the
            experiment's seed; and says the bytes of an update of so many values.
    """

    name: str
    options: type[BaseModel]
    build: Callable[[Any, Rule, int, int, int], tuple[Rule, TwoRounds]]


RANKS_METHODS: dict[str, RanksMethod] = {}


def register_ranks_method(method: RanksMethod) -> None:
    """Registers a method under its name."""
    RANKS_METHODS[method.name] = method
