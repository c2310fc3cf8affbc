"""Adasum between ranks that can read each other's memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fairseq_async.algorithms.adasum import combine_all, gram, gram_workspace, tree_weights
from fairseq_async.collective.messages import Messages
from fairseq_async.collective.mirrors import Mirror, opened

_IN_CACHE = 1 << 18  # elements of each rank that are worked on at a time


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor in this rank's part.

    Attributes:
        tensor: its index.
        vectors: those elements of each rank.
        own: this rank's among them, where the result is to be, since it is written to anyway.
        mirror: where the others find the result.
    """

    tensor: int
    vectors: list[Tensor]
    own: Tensor
    mirror: Tensor


class SharedMemoryAdasum:
    """The tree of :func:`fairseq_async.algorithms.adasum`, each rank working on its n-th part of all ranks' vectors.

    Every rank copies its tensors into a mirror that all can read and write, except for its own part. In its part it
    takes the products of every two ranks' vectors; their sums over all ranks, added up in the order of ranks, tell what
    each vector counts in the tree's result, and a rank adds up its part of that. So it reads all vectors twice, however
    deep the tree is.

    A rank puts the result into its own mirror, into the part that it has not written before, and every rank copies it
    from there; so the next call may write the rest while others still read. Messages only carry the products, and signs
    that a stage is over; when a rank is gone, the next one fails.

    Attributes:
        possible: False when it was found that not all ranks can open each other's memory.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._mirror: Mirror | None = None
        self._opened: list[Tensor] = []
        self._cuts: tuple[torch.dtype, list[int]] | None = None  # of the last call
        self.possible = True

    def combine(self, tensors: Sequence[Tensor]) -> bool:
        """Combines tensors of one type in place; False, and nothing done, where not all ranks share memory.

        Nor for fp64: where vectors cancel inside the tree, an error of their products in float64 counts twice.
        """
        kind, sizes = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        nbytes = sum(sizes) * kind.itemsize
        if kind == torch.float64 or not self._has_mirrors(nbytes):
            return False
        mirrors = [memory[:nbytes].view(kind).split(sizes) for memory in self._opened]
        mine = [tensor.contiguous().view(-1) for tensor in tensors]
        self._combine(mine, mirrors)
        for tensor, values in zip(tensors, mine, strict=True):
            if tensor.data_ptr() != values.data_ptr():
                tensor.copy_(values.view(tensor.shape))
        return True

    def _combine(self, mine: Sequence[Tensor], mirrors: Sequence[Sequence[Tensor]]) -> None:
        """Flat tensors; the mirrors of all ranks are cut as they are."""
        rank, ranks, sizes = self._messages.rank, self._messages.size, [tensor.numel() for tensor in mine]
        ends = [sum(sizes) * each // ranks for each in range(ranks + 1)]
        parts = [list(_cut(sizes, start, end)) for start, end in pairwise(ends)]
        if self._cuts != (mine[0].dtype, sizes):  # else nobody still reads what is written here
            self._messages.meet()
            self._cuts = mine[0].dtype, sizes
        others = [(owner, *cut) for owner in range(ranks) if owner != rank for cut in parts[owner]]
        for _, index, part in others:
            _copy(mirrors[rank][index][part], mine[index][part])
        self._messages.meet()
        self._combine_part(list(self._pieces(mine, mirrors, parts[rank])), len(mine))
        self._messages.meet()
        for owner, index, part in others:
            _copy(mine[index][part], mirrors[owner][index][part])

    def _pieces(
        self, mine: Sequence[Tensor], mirrors: Sequence[Sequence[Tensor]], cuts: Iterable[tuple[int, slice]]
    ) -> Iterator[Piece]:
        rank = self._messages.rank
        for index, cut in cuts:
            for first in range(cut.start, cut.stop, _IN_CACHE):
                part = slice(first, min(first + _IN_CACHE, cut.stop))
                vectors = [mirror[index][part] for mirror in mirrors]
                mirror, vectors[rank] = vectors[rank], mine[index][part]
                yield Piece(index, vectors, vectors[rank], mirror)

    def _combine_part(self, pieces: Sequence[Piece], tensors: int) -> None:
        """This rank's part of every tensor."""
        ranks = self._messages.size
        products = torch.zeros(tensors, ranks, ranks, dtype=torch.float64)
        workspace = gram_workspace(torch.device("cpu"), _IN_CACHE, ranks)
        for piece in pieces:
            products[piece.tensor] += gram(piece.vectors, workspace)
        weights = tree_weights(self._messages.everyones(products).sum(0)).tolist()
        for piece in pieces:
            combine_all(piece.vectors, weights[piece.tensor], piece.own, workspace)
            piece.mirror.copy_(piece.own)

    def _has_mirrors(self, nbytes: int) -> bool:
        """All ranks ask for the same size, and all get the same answer; once it was no, it stays no."""
        if self.possible and (self._mirror is None or self._mirror.nbytes < nbytes):
            self._mirror = _mirror(nbytes)
            address = [0] * 4 if self._mirror is None else self._mirror.address()
            found = [opened(*each) for each in self._messages.everyones(torch.tensor(address)).tolist()]
            self._opened = [memory for memory in found if memory is not None]
            complete = torch.tensor([len(self._opened) == self._messages.size])
            self.possible = bool(self._messages.everyones(complete).all())
        return self.possible


def _mirror(nbytes: int) -> Mirror | None:
    try:
        return Mirror(nbytes)
    except (OSError, AttributeError):  # no room, or a system without memfd_create
        return None


def _copy(destination: Tensor, source: Tensor) -> None:
    """By the C library, which goes past the cache where :func:`fairseq_async.exchange.environment` tells it to."""
    np.copyto(destination.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def _cut(sizes: Sequence[int], start: int, end: int) -> Iterator[tuple[int, slice]]:
    """What lies between two elements of tensors end to end: the tensor's index, and where in it."""
    offset = 0
    for index, size in enumerate(sizes):
        first, last = max(start - offset, 0), min(end - offset, size)
        if first < last:
            yield index, slice(first, last)
        offset += size
