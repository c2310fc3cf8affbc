"""Adasum between ranks that can read each other's memory."""

import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fairseq_async.algorithms.adasum import combine, pair_coefficients, pair_products, products_workspace, rounds
from fairseq_async.collective.messages import Messages

_HEADER = 64  # bytes; they begin with a number that only the owner can have told
_IN_CACHE = 1 << 18  # elements of each rank that are worked on at a time


class Mirror:
    """Memory of this process that others of the same user on the machine can open; gone with the last that has it.

    Raises:
        OSError: there is no room for it.
    """

    descriptor = -1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("adasum")
        os.posix_fallocate(self.descriptor, 0, _HEADER + nbytes)
        self.secret = secrets.randbits(62)
        memory = torch.frombuffer(mmap.mmap(self.descriptor, _HEADER + nbytes), dtype=torch.int64, count=1)
        memory[0] = self.secret

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def address(self) -> list[int]:
        """What :func:`opened` needs."""
        return [os.getpid(), self.descriptor, self.nbytes, self.secret]


def opened(process: int, descriptor: int, nbytes: int, secret: int) -> Tensor | None:
    """The bytes of a mirror; None where it cannot be opened from here: another machine, container or user."""
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER + nbytes:
            return None  # another file, which has this place on this machine
        memory = torch.frombuffer(mmap.mmap(file, _HEADER + nbytes), dtype=torch.uint8)
    finally:
        os.close(file)
    return memory[_HEADER:] if int(memory[:8].view(torch.int64)) == secret else None


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor in this rank's part.

    Attributes:
        tensor: its index.
        vectors: those elements of each rank; the first will be the result.
        own: this rank's among them, where the result is to be, since it is written to anyway.
        mirror: where the others find the result.
    """

    tensor: int
    vectors: list[Tensor]
    own: Tensor
    mirror: Tensor

    def combine(self, a: int, b: int, factors: Sequence[float]) -> None:
        """Two of the vectors, in place of the first."""
        if self.vectors[b] is self.own:
            combine(self.own, self.vectors[a], factors[::-1])
            self.vectors[a] = self.own
        else:
            combine(self.vectors[a], self.vectors[b], factors)


class SharedMemoryAdasum:
    """The tree of :func:`fairseq_async.algorithms.adasum`, each rank working on its n-th part of all ranks' vectors.

    Every rank copies its tensors into a mirror that all can read and write, except for its own part. In each round of
    the tree a rank combines its part of all pairs in place, with the products that all ranks have added up, in the
    order of ranks. It puts the result into its own mirror, into the part that it has not written before, and every rank
    copies it from there; so the next call may write the rest while others still read. Messages only carry the products,
    and signs that a stage is over; when a rank is gone, the next one fails.

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
        """Combines tensors of one type in place; False, and nothing done, where not all ranks share memory."""
        kind, sizes = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        nbytes = sum(sizes) * kind.itemsize
        if not self._has_mirrors(nbytes):
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
        """This rank's part of the tree; the products of a round are taken while what goes into them is in the cache."""
        plan = rounds(self._messages.size)
        workspace = products_workspace(torch.device("cpu"), _IN_CACHE)
        factors: list[list[list[float]]] = []
        for pairs, following in zip([[], *plan], [*plan, []], strict=True):
            products = torch.zeros(len(following), tensors, 3, dtype=torch.float64)
            for piece in pieces:
                for of_pair, (a, b) in zip(factors, pairs, strict=True):
                    piece.combine(a, b, of_pair[piece.tensor])
                for sums, (a, b) in zip(products, following, strict=True):
                    sums[piece.tensor] += pair_products(piece.vectors[a], piece.vectors[b], workspace)
                if not following:
                    piece.mirror.copy_(piece.own)
            if following:
                factors = pair_coefficients(self._messages.everyones(products).sum(0)).tolist()

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
