"""Adasum: a sum where gradients are orthogonal, a mean where they are parallel, and what lies between."""

from collections.abc import Sequence

import torch
from torch import Tensor

NEGLIGIBLE = 2.0**-511  # √(smallest normal double) = 1.49e-154: a vector of a smaller squared norm counts as zero
_IN_CACHE = 1 << 15  # elements that are converted to float64 at a time on a CPU; 512 KiB for both vectors
_AT_ONCE = 1 << 24  # the same elsewhere
_FITS = 1e30  # a larger coefficient, of a tiny vector beside a huge one, is not for float32


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Combines one tensor (one layer) of every rank (Maleki et al. 2021, arXiv 2006.02924, section 3).

    ::

        Adasum(a, b) = (1 − a·b / 2|a|²)·a + (1 − a·b / 2|b|²)·b

    The operator is symmetric but not associative, so the order is part of the definition: a binary tree over the
    ranks, 0 with 1, 2 with 3, …, then pairs of pairs. For a number of vectors between 2^x and 2^(x+1), vector r ≥ 2^x
    is combined with vector r − 2^x first.

    Everything is computed in float64 and rounded once: this is the reference for
    :class:`fairseq_async.collective.DistributedAdasum`.

    Args:
        vectors: tensors of one shape and one floating-point type. A gradient that a rank does not have is zero.

    Returns:
        a new tensor of that shape and type. NaN or Inf anywhere makes all of it NaN.

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
    """The largest power of two that is not above ``count``."""
    return 1 << (count.bit_length() - 1)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Which two of ``count`` vectors are combined, round by round; the result takes the place of the first of them."""
    power = largest_power(count)
    surplus = [(vector - power, vector) for vector in range(power, count)]
    levels = [[(a, a + (1 << x)) for a in range(0, power, 2 << x)] for x in range(power.bit_length() - 1)]
    return [surplus, *levels] if surplus else levels


def pair_products(a: Tensor, b: Tensor, workspace: Tensor | None = None) -> Tensor:
    """|a|², a·b and |b|² of two flat tensors: float64, shape [3].

    Args:
        workspace: float64 of shape [2, any], for a caller with many pairs: memory is slow when it is touched first.
    """
    if workspace is None:
        workspace = products_workspace(a.device, a.numel())
    gram = torch.zeros(2, 2, dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), workspace.shape[1]):
        part = slice(start, min(start + workspace.shape[1], a.numel()))
        both = workspace[:, : part.stop - part.start]
        both[0].copy_(a[part])
        both[1].copy_(b[part])
        gram.addmm_(both, both.t())
    return gram.flatten()[[0, 1, 3]]


def products_workspace(device: torch.device, largest: int) -> Tensor:
    """What :func:`pair_products` needs for tensors of at most ``largest`` elements to be fast."""
    size = _IN_CACHE if device.type == "cpu" else _AT_ONCE
    return torch.empty(2, max(1, min(size, largest)), dtype=torch.float64, device=device)


def pair_coefficients(products: Tensor) -> Tensor:
    """1 − a·b / 2|a|² and 1 − a·b / 2|b|².

    Args:
        products: |a|², a·b and |b|² of one pair of tensors or of many: float64, shape [..., 3].

    Returns:
        the coefficients of a and b: float64, shape [..., 2]. 1 for a vector that is :data:`NEGLIGIBLE`.
    """
    aa, ab, bb = products.unbind(-1)
    norms = torch.stack((aa, bb), dim=-1)
    return torch.where(norms < NEGLIGIBLE, 1.0, 1.0 - ab.unsqueeze(-1) / (2.0 * norms))


def combine(mine: Tensor, theirs: Tensor, factors: Sequence[float] | Tensor) -> None:
    """mine ← c₀·mine + c₁·theirs, of flat tensors, in place.

    Args:
        factors: c₀ and c₁. Tensors on a device stay there, since reading them would wait for it.
    """
    if not isinstance(factors, Tensor) and mine.dtype == torch.float32 and all(abs(each) <= _FITS for each in factors):
        mine.view(1, -1).addr_(torch.ones(1), theirs, beta=factors[0], alpha=factors[1])  # one pass over the memory
        return
    chunk = _IN_CACHE if mine.device.type == "cpu" else _AT_ONCE
    for a, b in zip(mine.split(chunk), theirs.split(chunk), strict=True):
        a.copy_(a.double() * factors[0] + b.double() * factors[1])


def _pair(a: Tensor, b: Tensor) -> Tensor:
    of_a, of_b = pair_coefficients(pair_products(a, b))
    return of_a * a + of_b * b
