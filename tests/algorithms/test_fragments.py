"""A model in fragments: how it is divided, what a worker goes on from, and one rule for each."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_async.algorithms import (
    DelayedNesterov,
    FragmentedRule,
    HeLoCo,
    MomentumLookAhead,
    NesterovMomentum,
    Update,
    fragments_of,
    in_turn,
)
from tests.helpers.references import DelayedNesterov64

GPT2 = [50257 * 768, 1024 * 768] + 12 * [
    768,
    768,
    768 * 2304,
    2304,
    768**2,
    768,
    768,
    768,
    768 * 3072,
    3072,
    768 * 3072,
    768,
]
LLAMA_1B = (
    [32000 * 2048]
    + 22 * [2048**2, 2048 * 256, 2048 * 256, 2048**2, *3 * [2048 * 5632], 2048, 2048]
    + [2048, 32000 * 2048]
)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def update(number: int, delta: torch.Tensor, worker: int = 0) -> Update:
    return Update(worker, number, 0, 1.0, delta)


@given(SIZES, st.data())
def test_fragments_are_whole_tensors_and_the_largest_is_as_small_as_it_can_be(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, sum(size > 0 for size in sizes)))
    fragments = fragments_of(sizes, count)
    assert len(fragments) == count and all(fragment.size > 0 for fragment in fragments)
    flat = torch.arange(sum(sizes))
    assert torch.equal(torch.cat([fragment.of(flat) for fragment in fragments]), flat)
    assert [fragment.size for fragment in fragments] == [sum(sizes[fragment.tensors]) for fragment in fragments]
    ways = [[0, *cut, len(sizes)] for cut in combinations(range(1, len(sizes)), count - 1)]
    best = min(max(sum(sizes[a:b]) for a, b in pairwise(way)) for way in ways)
    assert max(fragment.size for fragment in fragments) == best


@pytest.mark.parametrize("sizes", [GPT2, LLAMA_1B], ids=["gpt2", "llama_1b"])
@pytest.mark.parametrize("count", range(2, 33))
def test_tensors_of_a_transformer_in_their_order_are_as_evenly_divided_as_in_any_order(
    sizes: list[int], count: int
) -> None:
    """The largest fragment has at most 4/3 of what no order can be below: the mean, and the largest tensor."""
    largest = max(fragment.size for fragment in fragments_of(sizes, count))
    assert largest <= 4 / 3 * max(sum(sizes) / count, *sizes)


def test_there_are_no_more_fragments_than_tensors_with_elements() -> None:
    with pytest.raises(ValueError, match="the model has 2 tensors; give at most as many"):
        fragments_of([4, 0, 4], 3)


@given(st.integers(1, 4), st.integers(0, 2**31))
def test_each_fragment_is_a_model_of_its_own_with_the_papers_delayed_nesterov(n: int, seed: int) -> None:
    """Two workers, whose updates come in turn, and one of which is a turn ahead: three fragments in float64."""
    torch.manual_seed(seed)
    fragments = fragments_of([2, 1, 3], 3)
    theta = torch.randn(6)
    references = [DelayedNesterov64(fragment.of(theta), 0.7, 0.9, n) for fragment in fragments]
    rule = FragmentedRule(fragments, [DelayedNesterov(0.7, 0.9, n) for _ in fragments])
    for turn in range(3 * n + 2):
        for worker in (0, 1):
            number = turn + worker
            delta = torch.randn(in_turn(fragments, number).size)
            rule.apply(theta, update(number, delta, worker))
            references[number % 3].arrive(delta)
    expected = torch.cat([reference.theta for reference in references])
    assert torch.allclose(theta.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_rule_that_looks_across_tensors_looks_across_those_of_the_fragment() -> None:
    torch.manual_seed(0)
    fragments = fragments_of([2, 2, 3], 2)
    sizes = [[2, 2], [3]]
    theta, deltas = torch.randn(7), [torch.randn(4), torch.randn(3), torch.randn(4), torch.randn(3)]
    rule = FragmentedRule(fragments, [HeLoCo(0.7, 0.9, 2, own) for own in sizes])
    alone, parts = [HeLoCo(0.7, 0.9, 2, own) for own in sizes], [fragment.of(theta).clone() for fragment in fragments]
    for number, delta in enumerate(deltas):
        rule.apply(theta, update(number, delta))
        alone[number % 2].apply(parts[number % 2], update(number, delta))
    assert torch.equal(theta, torch.cat(parts))
    assert torch.equal(rule.dispatch(theta), torch.cat([own.dispatch(p) for own, p in zip(alone, parts, strict=True)]))


def test_one_fragment_is_the_whole_model_to_the_bit() -> None:
    torch.manual_seed(0)
    theta = torch.randn(5)
    whole, rule, plain = theta.clone(), FragmentedRule(fragments_of([2, 3], 1), [NesterovMomentum(0.7, 0.9, 2)]), None
    plain = NesterovMomentum(0.7, 0.9, 2)
    for number in range(4):
        delta = torch.randn(5)
        rule.apply(theta, update(number, delta))
        plain.apply(whole, update(number, delta))
    assert torch.equal(theta, whole)


def test_a_state_goes_on_in_every_fragment() -> None:
    torch.manual_seed(0)
    fragments = fragments_of([1, 1], 2)
    first, second = (FragmentedRule(fragments, [MomentumLookAhead(0.7, 0.9) for _ in fragments]) for _ in range(2))
    theta = torch.randn(2)
    for number in range(3):
        first.apply(theta, update(number, torch.randn(1)))
    second.load_state_dict(first.state_dict())
    other, delta = theta.clone(), torch.randn(1)
    first.apply(theta, update(3, delta))
    second.apply(other, update(3, delta))
    assert torch.equal(theta, other)
