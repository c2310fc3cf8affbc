"""Adasum between ranks that can map each other's memory."""

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

from fairseq_async.algorithms.adasum import combine_all, gram, gram_workspace, tree_weights
from fairseq_async.collective.adasum.messages import Messages

_HEADER = 64  # bytes in front of the data; the first 8 hold the secret, by which a reader recognises the buffer
_IN_CACHE = 1 << 18  # elements of each rank that are combined at a time


class SharedBuffer:
    """Anonymous memory that other processes of the same user on this machine can map.

    The memory needs no name and no room in ``/dev/shm``, and is gone with the last process that has it mapped.

    Args:
        nbytes: size of the data.

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
        """Returns the arguments with which another process calls :func:`open_buffer`."""
        return [os.getpid(), self.descriptor, self.nbytes, self.secret]


def open_buffer(process: int, descriptor: int, nbytes: int, secret: int) -> Tensor | None:
    """Maps the data of another process's :class:`SharedBuffer`, as bytes.

    Returns:
        None where it cannot be opened from here: its process is on another machine, in another container, or of
        another user.
    """
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER + nbytes:
            return None  # the owner is on another machine, and here the same numbers name another file
        memory = torch.frombuffer(mmap.mmap(file, _HEADER + nbytes), dtype=torch.uint8)
    finally:
        os.close(file)
    return memory[_HEADER:] if int(memory[:8].view(torch.int64)) == secret else None


@dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor that this rank combines.

    Attributes:
        tensor: index of the tensor.
        vectors: these elements of each rank.
        own: those of this rank, which the result replaces.
        shared: the same place in this rank's buffer, where the other ranks read the result.
    """

    tensor: int
    vectors: list[Tensor]
    own: Tensor
    shared: Tensor


class SharedMemoryAdasum:
    """The tree of :func:`fairseq_async.algorithms.adasum`, computed from shared buffers: rank n combines the n-th part.

    1. Every rank copies its tensors into its own buffer, which all ranks can map, except for the part that it combines.
    2. For its part, every rank computes the inner products of every two ranks' vectors. The products are gathered and
       added up in the order of ranks; from them follows the weight of each rank's vector in the tree's result.
    3. Every rank computes its part of the weighted sum, and every other rank copies this part from its buffer.

    So a rank reads all vectors twice, however deep the tree is.

    A buffer is written without locks. That is safe for two reasons: all ranks meet between the steps; and the result
    goes to the part of the buffer that step 1 leaves out, so the next call's step 1 may write while slower ranks still
    copy. The second holds only as long as the parts are cut as in the call before; otherwise the ranks meet first.

    Messages carry only the products and the barriers. When a rank is gone, the next message fails with RuntimeError.

    Attributes:
        possible: False once not all ranks could map each other's memory.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._buffer: SharedBuffer | None = None
        self._mapped: list[Tensor] = []  # every rank's buffer, in the order of ranks
        self._last_layout: tuple[torch.dtype, list[int]] | None = None
        self.possible = True

    def combine(self, tensors: Sequence[Tensor]) -> bool:
        """Combines tensors of one type in place. Every rank must call it with tensors of the same sizes.

        Returns:
            whether it has combined the tensors. False, and nothing is done, where not all ranks can share memory, and
            for fp64: where vectors cancel inside the tree, an error of their products in float64 counts twice.
        """
        kind, sizes = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        nbytes = sum(sizes) * kind.itemsize
        if kind == torch.float64 or not self._has_buffers(nbytes):
            return False
        shared = [memory[:nbytes].view(kind).split(sizes) for memory in self._mapped]
        mine = [tensor.contiguous().view(-1) for tensor in tensors]
        self._combine(mine, shared)
        for tensor, values in zip(tensors, mine, strict=True):
            if tensor.data_ptr() != values.data_ptr():
                tensor.copy_(values.view(tensor.shape))
        return True

    def _combine(self, mine: Sequence[Tensor], shared: Sequence[Sequence[Tensor]]) -> None:
        """Combines flat tensors.

        Args:
            shared: for each rank, the views of its buffer that belong to these tensors.
        """
        rank, ranks, sizes = self._messages.rank, self._messages.size, [tensor.numel() for tensor in mine]
        ends = [sum(sizes) * each // ranks for each in range(ranks + 1)]
        parts = [list(_cut(sizes, start, end)) for start, end in pairwise(ends)]
        if self._last_layout != (mine[0].dtype, sizes):  # other ranks may still read what is written next
            self._messages.barrier()
            self._last_layout = mine[0].dtype, sizes
        others = [(owner, *cut) for owner in range(ranks) if owner != rank for cut in parts[owner]]
        for _, index, part in others:
            _copy(shared[rank][index][part], mine[index][part])
        self._messages.barrier()
        self._combine_part(list(self._pieces(mine, shared, parts[rank])), len(mine))
        self._messages.barrier()
        for owner, index, part in others:
            _copy(mine[index][part], shared[owner][index][part])

    def _pieces(
        self, mine: Sequence[Tensor], shared: Sequence[Sequence[Tensor]], cuts: Iterable[tuple[int, slice]]
    ) -> Iterator[Piece]:
        rank = self._messages.rank
        for index, cut in cuts:
            for first in range(cut.start, cut.stop, _IN_CACHE):
                part = slice(first, min(first + _IN_CACHE, cut.stop))
                vectors = [of_rank[index][part] for of_rank in shared]
                own_shared, vectors[rank] = vectors[rank], mine[index][part]
                yield Piece(index, vectors, vectors[rank], own_shared)

    def _combine_part(self, pieces: Sequence[Piece], tensors: int) -> None:
        """Combines this rank's part of every tensor."""
        ranks = self._messages.size
        products = torch.zeros(tensors, ranks, ranks, dtype=torch.float64)
        workspace = gram_workspace(torch.device("cpu"), _IN_CACHE, ranks)
        for piece in pieces:
            products[piece.tensor] += gram(piece.vectors, workspace)
        weights = tree_weights(self._messages.all_gather(products).sum(0)).tolist()
        for piece in pieces:
            combine_all(piece.vectors, weights[piece.tensor], piece.own, workspace)
            piece.shared.copy_(piece.own)

    def _has_buffers(self, nbytes: int) -> bool:
        """Whether all ranks have mapped each other's buffers of at least this size; makes larger ones where needed.

        All ranks ask for the same size and must come to the same answer, since the other way to combine sends other
        messages. So each tells all others whether it succeeded; one failure is final for all.
        """
        if self.possible and (self._buffer is None or self._buffer.nbytes < nbytes):
            self._buffer = _allocate(nbytes)
            address = [0] * 4 if self._buffer is None else self._buffer.address()
            mapped = [open_buffer(*each) for each in self._messages.all_gather(torch.tensor(address)).tolist()]
            self._mapped = [memory for memory in mapped if memory is not None]
            complete = torch.tensor([len(self._mapped) == self._messages.size])
            self.possible = bool(self._messages.all_gather(complete).all())
        return self.possible


def _allocate(nbytes: int) -> SharedBuffer | None:
    try:
        return SharedBuffer(nbytes)
    except (OSError, AttributeError):  # no room, or a system without memfd_create
        return None


def _copy(destination: Tensor, source: Tensor) -> None:
    """Copies by the C library, which :func:`fairseq_async.exchange.environment` can tell to bypass the cache."""
    np.copyto(destination.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def _cut(sizes: Sequence[int], start: int, end: int) -> Iterator[tuple[int, slice]]:
    """Cuts the elements from ``start`` to ``end`` of tensors laid end to end: index of each tensor, and the slice."""
    offset = 0
    for index, size in enumerate(sizes):
        first, last = max(start - offset, 0), min(end - offset, size)
        if first < last:
            yield index, slice(first, last)
        offset += size
