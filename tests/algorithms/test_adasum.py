"""Maleki et al. 2021 on vectors small enough to work out by hand, and against plain Python in double precision."""

from collections.abc import Sequence
from math import fsum, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import adasum
from fairseq_async.algorithms.adasum import (
    NEGLIGIBLE,
    combine,
    combine_all,
    gram,
    gram_workspace,
    pair_coefficients,
    pair_products,
    rounds,
    tree_weights,
)

Vector = list[float]


def pair(a: Vector, b: Vector) -> Vector:
    """The operator, written down once more."""
    dot = fsum(x * y for x, y in zip(a, b, strict=True))
    of_a, of_b = (1.0 if n < 1.49e-154 else 1 - dot / (2 * n) for n in (fsum(x * x for x in v) for v in (a, b)))
    return [of_a * x + of_b * y for x, y in zip(a, b, strict=True)]


def tree(vectors: Sequence[Vector]) -> Vector:
    power = 2 ** (len(vectors).bit_length() - 1)
    level = [pair(v, vectors[power + r]) if power + r < len(vectors) else v for r, v in enumerate(vectors[:power])]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def distance(result: Tensor, expected: Vector) -> float:
    """|result - expected| / |expected| in double precision."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    return float((result.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def test_orthogonal_vectors_add() -> None:
    assert adasum([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("factor", [1.0, 3.0, -1.0, -0.5])
def test_parallel_vectors_average_whatever_their_signs(factor: float) -> None:
    a = torch.tensor([1.0, 2.0, -4.0])
    assert adasum([a, factor * a]).tolist() == ((1 + factor) / 2 * a).tolist()


def test_what_lies_between_is_as_worked_out_by_hand() -> None:
    # a·b = 1, |a|² = 1, |b|² = 2: half of a and three quarters of b
    assert adasum([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])]).tolist() == [1.25, 0.75]


def test_five_vectors_are_folded_and_then_combined_in_pairs_of_pairs() -> None:
    a, b, c, d, e = ([1.0, 0, 0], [1.0, 1, 0], [0.0, 2, 1], [1.0, 0, 3], [2.0, -1, 1])
    expected = pair(pair(pair(a, e), b), pair(c, d))
    assert distance(adasum([torch.tensor(v) for v in (a, b, c, d, e)]), expected) < 1e-7


def test_the_result_depends_on_the_order_of_four_vectors() -> None:
    vectors = [torch.tensor(v) for v in ([1.0, 0], [1.0, 1], [0.0, 2], [3.0, 1])]
    assert not torch.allclose(adasum(vectors), adasum([vectors[i] for i in (0, 2, 1, 3)]))


@pytest.mark.parametrize("count", range(1, 9))
def test_the_same_vector_on_all_ranks_comes_back(count: int) -> None:
    vector = torch.randn(1000)
    assert torch.equal(adasum([vector] * count), vector)


def test_a_rank_without_a_gradient_adds_nothing() -> None:
    gradient = torch.tensor([1.0, -2.0])
    assert torch.equal(adasum([torch.zeros(2), gradient]), gradient)
    assert torch.equal(adasum([torch.zeros(2), torch.zeros(2)]), torch.zeros(2))


@pytest.mark.parametrize("sizes", [(1e-38, 1e-38), (1e19, 1e19), (1e-38, 1e19), (1e-30, 1.0)])
def test_tiny_and_huge_vectors_neither_vanish_nor_overflow(sizes: tuple[float, float]) -> None:
    torch.manual_seed(0)
    vectors = [size * torch.randn(100_000) for size in sizes]
    assert distance(adasum(vectors), tree([v.tolist() for v in vectors])) < 100 * torch.finfo(torch.float32).eps


def test_a_coefficient_is_one_below_the_square_root_of_the_smallest_double() -> None:
    assert pytest.approx(sqrt(torch.finfo(torch.float64).tiny), rel=1e-12) == NEGLIGIBLE
    just_below, at_it = 0.999 * NEGLIGIBLE, NEGLIGIBLE
    products = torch.tensor([[just_below, 1e-160, 1.0], [at_it, 1e-155, 1.0]], dtype=torch.float64)
    (below, _), (at, _) = pair_coefficients(products).tolist()
    assert below == 1.0 and at == pytest.approx(1 - 1e-155 / (2 * NEGLIGIBLE))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_has_the_type_and_shape_of_the_vectors(kind: torch.dtype) -> None:
    torch.manual_seed(1)
    vectors = [torch.randn(3, 5, 7).to(kind) for _ in range(6)]
    result = adasum(vectors)
    assert (result.dtype, result.shape) == (kind, (3, 5, 7))
    assert distance(result.flatten(), tree([v.flatten().tolist() for v in vectors])) < 2 * torch.finfo(kind).eps


def test_nan_and_infinity_spread_to_every_element() -> None:
    for bad in (float("nan"), float("inf")):
        for rank in range(3):
            vectors = [torch.randn(4) for _ in range(3)]
            vectors[rank][2] = bad
            assert adasum(vectors).isnan().all()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        [torch.zeros(2, dtype=torch.int64)],
    ],
)
def test_vectors_that_do_not_fit_are_refused(wrong: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="adasum needs"):
        adasum(wrong)


def test_the_vectors_are_left_alone_and_not_shared() -> None:
    vectors = [torch.ones(3)]
    adasum(vectors).zero_()
    assert vectors[0].tolist() == [1.0, 1.0, 1.0]


def test_products_of_long_vectors_are_those_in_double_precision() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(100_003), torch.randn(100_003)
    x, y = a.double(), b.double()
    expected = torch.stack((x.dot(x), x.dot(y), y.dot(y)))
    torch.testing.assert_close(pair_products(a, b), expected, rtol=1e-12, atol=1e-10)


numbers = st.floats(-(2.0**20), 2.0**20, width=32)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=n, max_size=n)))
def test_it_equals_the_formula(vectors: list[Vector]) -> None:
    expected = tree(vectors)
    largest = max(abs(x) for v in [*vectors, expected] for x in v)
    result = adasum([torch.tensor(v, dtype=torch.float64) for v in vectors])
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9 * largest)


@settings(max_examples=50, deadline=None)
@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3))
def test_a_pair_may_be_swapped(a: Vector, b: Vector) -> None:
    x, y = torch.tensor(a), torch.tensor(b)
    assert torch.equal(adasum([x, y]), adasum([y, x]))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([1.0, 1e-38, 1e19]))
def test_the_tree_is_a_sum_weighted_by_the_products_alone(count: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = list((size * torch.randn(count, 30, generator=generator)).double())
    weights = tree_weights(gram(vectors))
    sum_ = sum((weight * vector for weight, vector in zip(weights, vectors, strict=True)), torch.zeros(30))
    torch.testing.assert_close(sum_, adasum(vectors), rtol=1e-11, atol=1e-11 * size)


def workspace(vectors: int) -> Tensor:
    return gram_workspace(torch.device("cpu"), 10_000, vectors)


def test_vectors_that_cancel_count_no_more_than_in_the_tree() -> None:
    """All that is left of the first two is rounding, which would turn the others' result."""
    torch.manual_seed(3)
    a, b, c = torch.randn(3, 1001)
    for factor in (1.0, 3.0, 1e-30):
        vectors = [a * factor, -a * factor, b, c]
        weights = tree_weights(gram(vectors)).tolist()
        combine_all(list(vectors), weights, result := torch.empty(1001), workspace(4))
        assert distance(result, adasum([b.double(), c.double()]).tolist()) < 1e-6


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", range(2, 10))
def test_a_weighted_sum_may_take_the_place_of_any_of_its_vectors(kind: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    vectors = [torch.randn(70_001).to(kind) for _ in range(count)]
    weights = torch.randn(count).tolist()
    expected = sum((w * v.double() for w, v in zip(weights, vectors, strict=True)), torch.zeros(70_001))
    for place in range(count):
        own = [vector.clone() for vector in vectors]
        combine_all(own, weights, own[place], workspace(count))
        assert distance(own[place], expected.tolist()) < 2 * torch.finfo(kind).eps
        assert all(torch.equal(own[i], vectors[i]) for i in range(count) if i != place)


@pytest.mark.parametrize("count", range(2, 10))
def test_a_sum_of_equal_vectors_is_that_vector_to_the_bit(count: int) -> None:
    torch.manual_seed(1)
    vector = torch.randn(10_007)
    equal = [vector.clone() for _ in range(count)]
    combine_all(equal, tree_weights(gram(equal)).tolist(), equal[-1], workspace(count))
    assert torch.equal(equal[-1], vector)


def in_messages(vectors: Sequence[Tensor]) -> Tensor:
    """The tree as ranks that send each other messages compute it: rounded to float32 between its rounds."""
    left = [vector.clone() for vector in vectors]
    for pairs in rounds(len(left)):
        for a, b in pairs:
            combine(left[a], left[b], pair_coefficients(pair_products(left[a], left[b])).tolist())
    return left[0]


def in_shared_memory(vectors: Sequence[Tensor]) -> Tensor:
    """As ranks compute it that see each other's memory: the weights first, from all products."""
    result, weights = torch.empty_like(vectors[0]), tree_weights(gram(vectors)).tolist()
    combine_all([vector.clone() for vector in vectors], weights, result, workspace(len(vectors)))
    return result


def test_what_two_vectors_leave_that_cancel_has_no_direction() -> None:
    """(a, −a) leaves nothing, and Adasum(0, v) = v; of rounding errors along a it would be a/2."""
    a = torch.randn(100, generator=torch.Generator().manual_seed(1))
    noise = 1e-7 * a.abs()
    for vectors in ([a, -a, a, a], [a, noise - a, a, a]):
        for path in (adasum, in_messages, in_shared_memory):
            torch.testing.assert_close(path(vectors), a, rtol=1e-6, atol=1e-6)


def test_a_coefficient_that_float32_does_not_have_is_one_of_double_precision() -> None:
    """Of a tiny vector beside a huge parallel one it is −5·10⁴⁴."""
    tiny, huge = torch.tensor([1e-35, -2e-35]), torch.tensor([1e10, -2e10])
    for path in (in_messages, in_shared_memory):
        torch.testing.assert_close(path([tiny, huge]), huge / 2, rtol=1e-6, atol=0.0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, -1, 0.5, -0.5, 2, -2, 3, 0, -1 / 3, 0.3]), st.sampled_from([0, 0, 0, 1, -1])),
        min_size=2,
        max_size=8,
    ),
    st.integers(0, 99),
)
def test_the_three_ways_to_compute_the_tree_agree_where_vectors_cancel(
    multiples: list[tuple[float, float]], seed: int
) -> None:
    """Multiples of one vector and sums with another one, which cancel in any of the tree's rounds."""
    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed))
    vectors = [of_a * a + of_b * b for of_a, of_b in multiples]
    largest = max(float(vector.norm()) for vector in vectors)
    expected = adasum(vectors)
    for path in (in_messages, in_shared_memory):
        assert float((path(vectors) - expected).norm()) <= 1e-4 * largest
