"""A model in fragments, which local SGD exchanges in turn.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512, algorithm 2), and Decoupled
DiLoCo (arXiv 2604.21428): a worker sends one of P fragments of whole tensors every H/P local steps, so that each goes
every H steps, and goes on computing for τ steps before it takes the fragment that comes back.

The papers blend what comes back with the worker's own, ½θ + ½Θ. A blend keeps half of all local steps since the last
one, which the next update then has once more. Here the worker keeps the steps since the fragment was sent, and those
alone: Θ + (θ − θ_sent), so that each local step is in one update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import Rule, State
from fairseq_async.algorithms.update import Update


@dataclass(frozen=True)
class Fragment:
    """Tensors that follow each other, and so are one piece of the flat parameters.

    Attributes:
        tensors: which of the model's.
        elements: their place in the flat parameters.
    """

    tensors: slice
    elements: slice

    @property
    def size(self) -> int:
        return int(self.elements.stop - self.elements.start)

    def of(self, flat: Tensor) -> Tensor:
        """The fragment's part of a flat tensor of all elements, as a view."""
        return flat[self.elements]


def fragments_of(sizes: Sequence[int], count: int) -> tuple[Fragment, ...]:
    """Divides a model into ``count`` fragments, so that the largest is as small as it can be.

    Tensors keep their order, so that a fragment is sent without being gathered. The largest fragment has at most the
    mean of all and the largest tensor together.

    Args:
        sizes: number of elements of each tensor, in the order of the flat parameters.

    Raises:
        ValueError: there are fewer tensors than fragments.
    """
    tensors = sum(size > 0 for size in sizes)
    if not 1 <= count <= tensors:
        raise ValueError(f"the model has {tensors} tensors; give at most as many fragments")
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    places = [0, *accumulate(sizes)]
    ends = _split(_filled(sizes, low), count, places)
    return tuple(Fragment(slice(a, b), slice(places[a], places[b])) for a, b in pairwise([0, *ends]))


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """Ends of the fewest fragments of at most so many elements."""
    ends: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if number and held + size > capacity:
            ends.append(number)
            held = 0
        held += size
    return [*ends, len(sizes)]


def _split(ends: list[int], count: int, places: list[int]) -> list[int]:
    """The ends of ``count`` fragments: those that there are, and further ones behind single tensors."""
    taken = {places[end] for end in (0, *ends)}  # a tensor without elements is no fragment
    spare = {place: end for end, place in enumerate(places) if place not in taken}
    return sorted(ends + list(spare.values())[: count - len(ends)])


def in_turn(fragments: Sequence[Fragment], sequence: int) -> Fragment:
    """The fragment that a worker's update of this number is of."""
    return fragments[sequence % len(fragments)]


class FragmentedRule(Rule):
    """One rule for each fragment, as for a model of its own: its momentum, its buffers and its counts.

    An update's ``delta`` has the elements of the fragment whose turn it is by the update's sequence number. A rule that
    looks across tensors looks across those of the fragment.

    Args:
        rules: one for each of the fragments.
    """

    def __init__(self, fragments: Sequence[Fragment], rules: Sequence[Rule]) -> None:
        self.fragments, self.rules = fragments, rules

    def of(self, sequence: int, parameters: Tensor) -> tuple[Rule, Tensor]:
        """The rule of the fragment whose turn it is, and the fragment of the flat ``parameters``."""
        return self.rules[sequence % len(self.rules)], in_turn(self.fragments, sequence).of(parameters)

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies the update to its fragment of the flat ``parameters``."""
        rule, fragment = self.of(update.sequence, parameters)
        return rule.apply(fragment, update)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """What a worker starts from that takes all fragments at once, in a new tensor."""
        parts = zip(self.fragments, self.rules, strict=True)
        return torch.cat([rule.dispatch(fragment.of(parameters)) for fragment, rule in parts])

    def limit_round(self, updates: int) -> None:
        for rule in self.rules:
            rule.limit_round(updates)

    def state_dict(self) -> State:
        """One state for each fragment."""
        return {"fragments": [rule.state_dict() for rule in self.rules]}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`, of as many fragments."""
        for rule, own in zip(self.rules, state["fragments"], strict=True):
            rule.load_state_dict(own)
