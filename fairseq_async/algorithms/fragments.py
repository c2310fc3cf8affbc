"""Fragments of a model, which the workers of local SGD exchange in turn.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512, algorithm 2), and Decoupled
DiLoCo (arXiv 2604.21428): a model is cut into P fragments of whole tensors. A worker sends one of them every H/P local
steps, so that each is sent every H steps. It computes τ more steps before it takes the fragment that the server sends
back.

The papers blend the server's fragment Θ with the worker's own θ: ½θ + ½Θ. A blend keeps half of all local steps since
the blend before, so the next update contains these steps once more. Here the worker keeps only the steps that it took
since it sent the fragment, Θ + (θ − θ_sent), so that each local step is in one update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import CompoundRule, Rule, State, Update

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Fragment:
    """One fragment: consecutive tensors of the model, which are one piece of the flat parameters.

    Attributes:
        tensors: which of the model's tensors it has.
        elements: where these tensors lie in the flat parameters.
    """

    tensors: slice
    elements: slice

    @property
    def size(self) -> int:
        return int(self.elements.stop - self.elements.start)

    def of(self, flat: Tensor) -> Tensor:
        """Returns the fragment's part of a flat tensor of the whole model, as a view."""
        return flat[self.elements]


def fragments_of(sizes: Sequence[int], count: int) -> tuple[Fragment, ...]:
    """Divides a model into ``count`` fragments, so that the largest is as small as it can be.

    Tensors keep their order, so that a fragment lies in one piece and is sent without being gathered. The largest
    fragment has at most as many elements as the mean fragment and the largest tensor together.

    Args:
        sizes: number of elements of each tensor, in the order of the flat parameters.
        count: number of fragments.

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
    """Returns the ends of the fewest fragments of at most ``capacity`` elements."""
    ends: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if held + size > capacity:
            ends.append(number)
            held = 0
        held += size
    return [*ends, len(sizes)]


def _split(ends: list[int], count: int, places: list[int]) -> list[int]:
    """Returns the ends of ``count`` fragments: the given ``ends``, and further ones after single tensors."""
    taken = {places[end] for end in (0, *ends)}  # a tensor without elements is no fragment
    spare = {place: end for end, place in enumerate(places) if place not in taken}
    return sorted(ends + list(spare.values())[: count - len(ends)])


def in_turn(of_fragments: Sequence[_Item], sequence: int) -> _Item:
    """Returns the fragment to which a worker's update with this sequence number belongs, or what belongs to it.

    Args:
        of_fragments: the fragments, or something that each of them has, such as its rule, in their order.
    """
    return of_fragments[sequence % len(of_fragments)]


class FragmentedRule(CompoundRule):
    """Applies a separate rule to each fragment, as to a model of its own: with its own momentum, buffers and counts.

    An update's ``delta`` has the elements of the fragment whose turn it is by the update's sequence number. A rule that
    computes across tensors does so across the tensors of its fragment.

    Args:
        rules: one rule for each of the fragments.
    """

    def __init__(self, fragments: Sequence[Fragment], rules: Sequence[Rule]) -> None:
        self.fragments, self.rules = fragments, rules

    def of(self, sequence: int, parameters: Tensor) -> tuple[Rule, Tensor]:
        """Returns the rule of the fragment whose turn it is, and that fragment of the flat ``parameters``."""
        return in_turn(self.rules, sequence), in_turn(self.fragments, sequence).of(parameters)

    def apply(self, parameters: Tensor, update: Update) -> float:
        """Applies the update to its fragment of the flat ``parameters``."""
        rule, fragment = self.of(update.sequence, parameters)
        return rule.apply(fragment, update)

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns the parameters from which a worker starts that takes all fragments at once, in a new tensor."""
        parts = zip(self.fragments, self.rules, strict=True)
        return torch.cat([rule.dispatch(fragment.of(parameters)) for fragment, rule in parts])

    def state_dict(self) -> State:
        """Returns one state for each fragment."""
        return {"fragments": [rule.state_dict() for rule in self.rules]}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned for a rule of as many fragments."""
        for rule, own in zip(self.rules, state["fragments"], strict=True):
            rule.load_state_dict(own)
