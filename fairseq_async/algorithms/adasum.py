"""Adasum combines gradients: orthogonal ones to their sum, parallel ones to their mean, others to a vector between."""

from collections.abc import Sequence

import torch
from torch import Tensor

NEGLIGIBLE = 2.0**-511  # √(smallest normal double) = 1.49e-154: a vector with a smaller squared norm counts as zero
_IN_CACHE = 1 << 17  # elements of all vectors that are converted to float64 at a time on a CPU: 1 MiB
_AT_ONCE = 1 << 25  # the same on other devices
# a sum of float32 vectors with a squared norm below this share of (Σ norms of its summands)² is rounding errors
_CANCELLED = 1e-12
_ROUNDING = 1e-15  # the same where the squared norm comes from products in float64
_FITS = 1e30  # largest coefficient for float32; that of a tiny vector beside a huge one may be larger


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Combines the tensors that all ranks have for one layer (Maleki et al. 2021, arXiv 2006.02924, section 3).

    ::

        Adasum(a, b) = (1 − a·b / 2|a|²)·a + (1 − a·b / 2|b|²)·b

    The operator is symmetric but not associative, so the order is part of the definition: a binary tree over the
    ranks, 0 with 1, 2 with 3, …, then pairs of pairs. For a number of vectors between 2^x and 2^(x+1), vector r ≥ 2^x
    is combined with vector r − 2^x first.

    Everything is computed in float64 and rounded once: this is the reference for
    :class:`fairseq_async.collective.DistributedAdasum`.

    Args:
        vectors: tensors of one shape and one floating-point type. Give zeros for a rank that has no gradient.

    Returns:
        a new tensor of that shape and type. NaN or Inf anywhere in two or more vectors makes all of it NaN.

    Raises:
        ValueError: no vectors, or vectors that differ in shape or type or are not floating-point.

    Example::

        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
        tensor([1., 1.])
        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])])
        tensor([2., 0.])
    """
    if not vectors:
        raise ValueError("adasum needs at least one vector")
    first = vectors[0]
    for vector in vectors:
        if vector.shape != first.shape or vector.dtype != first.dtype or not vector.is_floating_point():
            raise ValueError(
                "adasum needs vectors of one shape and one floating-point type; "
                f"got {tuple(first.shape)} {first.dtype} and {tuple(vector.shape)} {vector.dtype}"
            )
    tree = [vector.detach().to(torch.float64).flatten() for vector in vectors]
    for pairs in rounds(len(tree)):
        for a, b in pairs:
            tree[a] = _pair(tree[a], tree[b])
    return tree[0].view(first.shape).to(first.dtype, copy=True)


def largest_power(count: int) -> int:
    """Returns the largest power of two that is not above ``count``."""
    return 1 << (count.bit_length() - 1)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns the pairs of ``count`` vectors to combine, round by round; a result replaces its pair's first vector."""
    power = largest_power(count)
    surplus = [(vector - power, vector) for vector in range(power, count)]
    levels = [[(a, a + (1 << x)) for a in range(0, power, 2 << x)] for x in range(power.bit_length() - 1)]
    return [surplus, *levels] if surplus else levels


def gram(vectors: Sequence[Tensor], workspace: Tensor | None = None) -> Tensor:
    """Returns the inner products of all pairs of flat tensors: float64, shape [vectors, vectors].

    Args:
        workspace: from :func:`gram_workspace`, for a caller with many tensors: new memory is slow at first touch.
    """
    first, count = vectors[0], len(vectors)
    if workspace is None:
        workspace = gram_workspace(first.device, first.numel(), count)
    products = torch.zeros(count, count, dtype=torch.float64, device=first.device)
    for start in range(0, first.numel(), workspace.shape[1]):
        part = slice(start, min(start + workspace.shape[1], first.numel()))
        converted = workspace[:, : part.stop - part.start]
        for row, vector in zip(converted, vectors, strict=True):
            row.copy_(vector[part])
        for index, row in enumerate(converted):
            products[index, index:].addmv_(converted[index:], row)
    return products.triu() + products.triu(1).t()


def gram_workspace(device: torch.device, largest: int, vectors: int = 2) -> Tensor:
    """Allocates the memory in which :func:`gram` converts tensors of at most ``largest`` elements, part by part."""
    size = (_IN_CACHE if device.type == "cpu" else _AT_ONCE) // vectors
    return torch.empty(vectors, max(1, min(size, largest)), dtype=torch.float64, device=device)


def pair_products(a: Tensor, b: Tensor, workspace: Tensor | None = None) -> Tensor:
    """Returns |a|², a·b and |b|² of two flat tensors: float64, shape [3]."""
    return gram([a, b], workspace).flatten()[[0, 1, 3]]


def tree_weights(products: Tensor) -> Tensor:
    """Returns the weight of each vector in the result of the Adasum tree, from the vectors' inner products alone.

    Every sum inside the tree is a weighted sum of the vectors, so its products follow from the vectors' products:
    (Σ uᵢgᵢ)·(Σ wⱼgⱼ) = Σ uᵢwⱼ gᵢ·gⱼ. Where vectors cancel inside the tree but for the last digits, the sum counts as
    zero here; the tree would go on with the rounding errors.

    Args:
        products: inner products of all pairs of vectors, as :func:`gram` returns them: float64, shape
            [..., vectors, vectors].

    Returns:
        the weights: float64, shape [..., vectors].
    """
    lengths = products.diagonal(dim1=-2, dim2=-1).sqrt()
    tree = list(
        torch.eye(products.shape[-1], dtype=products.dtype, device=products.device).expand_as(products).unbind(-2)
    )

    def square(weights: Tensor) -> Tensor:
        value, summands = _product(products, weights, weights), (weights.abs() * lengths).sum(-1)
        return torch.where(value < _ROUNDING * summands.square(), 0.0, value)

    for pairs in rounds(len(tree)):
        for a, b in pairs:
            three = (square(tree[a]), _product(products, tree[a], tree[b]), square(tree[b]))
            of_a, of_b = pair_coefficients(torch.stack(three, dim=-1)).unsqueeze(-2).unbind(-1)
            tree[a] = of_a * tree[a] + of_b * tree[b]
    return tree[0]


def _product(products: Tensor, u: Tensor, w: Tensor) -> Tensor:
    return (u.unsqueeze(-1) * products * w.unsqueeze(-2)).sum((-2, -1))


def pair_coefficients(products: Tensor) -> Tensor:
    """Returns the coefficients of a and b in Adasum(a, b): 1 − a·b / 2|a|² and 1 − a·b / 2|b|².

    Args:
        products: |a|², a·b and |b|² of one pair of tensors or of many: float64, shape [..., 3].

    Returns:
        the coefficients of a and b: float64, shape [..., 2]. A vector with a squared norm below :data:`NEGLIGIBLE` has
        the coefficient 1. Both are 0 where the two vectors cancel: only rounding errors would be left, in an arbitrary
        direction, and the next pair would take away half of the other vector along that direction.
    """
    aa, ab, bb = products.unbind(-1)
    norms = torch.stack((aa, bb), dim=-1)
    factors = torch.where(norms < NEGLIGIBLE, 1.0, 1.0 - ab.unsqueeze(-1) / (2.0 * norms))
    lengths = (factors.abs() * norms.clamp_min(0.0).sqrt()).sum(-1)
    square = (factors.square() * norms).sum(-1) + 2.0 * factors.prod(-1) * ab
    return torch.where((square < _CANCELLED * lengths.square()).unsqueeze(-1), 0.0, factors)


def combine(mine: Tensor, theirs: Tensor, factors: Sequence[float] | Tensor) -> None:
    """Computes mine ← c₀·mine + c₁·theirs for flat tensors, in place.

    Args:
        factors: c₀ and c₁. A tensor of factors stays on its device, since reading it would wait for the device.
    """
    if not isinstance(factors, Tensor) and _in_float32(mine, factors):
        _scaled_sum(mine, theirs, factors, out=mine)
        return
    chunk = (_IN_CACHE if mine.device.type == "cpu" else _AT_ONCE) // 4  # three temporaries
    for a, b in zip(mine.split(chunk), theirs.split(chunk), strict=True):
        a.copy_(a.double() * factors[0] + b.double() * factors[1])


def combine_all(vectors: Sequence[Tensor], weights: Sequence[float], result: Tensor, workspace: Tensor) -> None:
    """Sets result ← Σ wᵢ·vectorsᵢ of flat CPU tensors, added up as in the tree in fp32, and in float64 one by one in
    other types or with large weights. Equal vectors give that vector back, but for rounding there.

    Args:
        weights: wᵢ, from :func:`tree_weights`.
        result: one of the vectors, or separate memory.
        workspace: from :func:`gram_workspace`.
    """
    scratch = workspace.view(torch.float32)
    chunk = scratch.shape[1]
    for out, *parts in zip(*(each.split(chunk) for each in (result, *vectors)), strict=True):
        if _in_float32(result, weights):
            _sum_by_rounds(parts, weights, scratch[:, : out.numel()], out)
        else:
            out.copy_(sum((part.double() * weight for part, weight in zip(parts, weights, strict=True)), 0.0))


def _sum_by_rounds(parts: list[Tensor], weights: Sequence[float], scratch: Tensor, out: Tensor) -> None:
    left = list(weights)  # the factor that each part still has to be multiplied by
    pairs = [pair for round_ in rounds(len(parts)) for pair in round_]
    for a, b in pairs:
        to = out if (a, b) == pairs[-1] else scratch[a]
        first, second = (b, a) if to.data_ptr() == parts[b].data_ptr() else (a, b)
        _scaled_sum(parts[first], parts[second], (left[first], left[second]), out=to)
        parts[a], left[a] = to, 1.0


def _scaled_sum(a: Tensor, b: Tensor, factors: Sequence[float], out: Tensor) -> None:
    """Writes c₀·a + c₁·b of fp32 tensors to ``out``, in one pass over memory; ``out`` may be ``a``."""
    torch.addr(a.view(1, -1), a.new_ones(1), b, beta=factors[0], alpha=factors[1], out=out.view(1, -1))


def _in_float32(values: Tensor, factors: Sequence[float]) -> bool:
    return values.dtype == torch.float32 and all(abs(each) <= _FITS for each in factors)


def _pair(a: Tensor, b: Tensor) -> Tensor:
    of_a, of_b = pair_coefficients(pair_products(a, b))
    combined: Tensor = of_a * a + of_b * b
    return combined
