"""Adasum between the ranks of a process group, by recursive vector halving and doubling."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.algorithms.adasum import (
    combine,
    gram_workspace,
    largest_power,
    pair_coefficients,
    pair_products,
)
from fairseq_async.collective.adasum.fusion import Fusion, Range
from fairseq_async.collective.adasum.messages import Messages, wait
from fairseq_async.collective.adasum.shared_memory import SharedMemoryAdasum
from fairseq_async.errors import ConfigurationError


class DistributedAdasum:
    """Combines the tensors of all ranks as :func:`fairseq_async.algorithms.adasum` does, each tensor by itself.

    Recursive vector halving and doubling (Maleki et al. 2021, arXiv 2006.02924). For a number of ranks that is a power
    of two, at distance d = 1, 2, 4, …: the partners rank and rank ^ d exchange halves of what they hold, a block of 2d
    ranks adds up the products |a|², a·b, |b|² of every tensor, and each rank combines the half that it keeps. Then the
    halves go back in the opposite order. A rank r ≥ 2^x, beyond the largest power, shares such an exchange with rank
    r − 2^x at the beginning and gets the result at the end.

    So a rank sends as many bytes as in an all-reduce. Every element is combined by one rank alone and copied to the
    others: all ranks end with the same bits, and the same input gives the same bits again.

    Ranks that can map each other's memory do not send their tensors, and compute the same in another way:
    :class:`fairseq_async.collective.adasum.shared_memory.SharedMemoryAdasum`.

    A process group allows one call at a time. Between calls the object keeps memory of half the size of the tensors, or
    of their whole size where memory is shared.

    Args:
        process_group: a group of Gloo or NCCL; the default group when it is None.
        shared_memory: whether to use shared memory for tensors on the CPU, where all ranks are in one machine and
            container.

    Raises:
        ConfigurationError: the group has one rank only, or this process is not in it, or there is no group.

    Example::

        >>> combine = DistributedAdasum()
        >>> loss.backward()
        >>> combine([parameter.grad for parameter in model.parameters()])
        >>> optimizer.step()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, shared_memory: bool = True) -> None:
        group = process_group or dist.group.WORLD
        if group is None:
            raise ConfigurationError("Adasum: torch.distributed is not initialised")
        if dist.get_rank(group) < 0:
            raise ConfigurationError("Adasum: this process is not a member of the process group")
        self.messages = Messages(group)
        self.rank, self.size = self.messages.rank, self.messages.size
        if self.size < 2:
            raise ConfigurationError("Adasum combines the gradients of several ranks, and this process group has one")
        self._sends_from_gpu = "nccl" in dist.get_backend(group)
        if self._sends_from_gpu:
            # NCCL wants all ranks in a group's first operation, and our messages are between two of them.
            dist.barrier(group)
        self.power = largest_power(self.size)
        self.shared_memory = SharedMemoryAdasum(self.messages) if shared_memory else None
        self._received: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Combines tensors in place. Every rank must call it with tensors of the same shapes, in the same order.

        Args:
            tensors: fp32, fp16, bf16 or fp64. A rank that has no gradient for a parameter gives zeros. NaN or Inf in a
                tensor on one rank becomes NaN in all of that tensor on every rank.

        Raises:
            ConfigurationError: a tensor is sparse or not floating-point.
            RuntimeError: a rank is gone; the tensors are then neither the old nor the new ones.
        """
        check_dense(tensors)
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        with torch.no_grad():
            for kind in kinds:
                self._combine([tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind])

    def _combine(self, tensors: Sequence[Tensor]) -> None:
        """Combines tensors of one type on one device."""
        if tensors[0].is_cuda and not self._sends_from_gpu:  # Gloo reads a message from memory, and aborts elsewhere
            return self._combine_in_memory(tensors)
        shared = self.shared_memory if tensors[0].device.type == "cpu" else None
        if shared is None or not shared.combine(tensors):
            fusion = Fusion(tensors)
            self._combine_fused(fusion)
            fusion.write_back()

    def _combine_in_memory(self, tensors: Sequence[Tensor]) -> None:
        """Combines copies of a GPU's tensors, one after the other with the work of the current stream."""
        here = [tensor.cpu() for tensor in tensors]
        self._combine(here)
        for tensor, combined in zip(tensors, here, strict=True):
            tensor.copy_(combined)

    def _combine_fused(self, fusion: Fusion) -> None:
        """Combines by messages. Both partners of each message must reach it in the same order, or all ranks hang."""
        whole = (0, fusion.size)
        surplus = self.rank ^ self.power  # the partner, if this rank or the partner is beyond the largest power
        if self.rank >= self.power:
            kept, given = self._halve(fusion, whole, [surplus])
            self._exchange(fusion, surplus, send=kept)
            self._exchange(fusion, surplus, receive=whole)
            return
        if surplus < self.size:
            kept, given = self._halve(fusion, whole, [surplus])
            self._exchange(fusion, surplus, receive=given)
        self._reduce(fusion, whole)
        if surplus < self.size:
            self._exchange(fusion, surplus, send=whole)

    def _reduce(self, fusion: Fusion, whole: Range) -> None:
        """Does the halving down the tree, then the doubling, between the ranks below the largest power of two."""
        kept, path = whole, []
        for level in range(self.power.bit_length() - 1):
            block = [self.rank ^ (1 << lower) for lower in range(level + 1)]
            kept, given = self._halve(fusion, kept, block)
            path.append((block[-1], kept, given))
        for partner, kept, given in reversed(path):
            self._exchange(fusion, partner, send=kept, receive=given)

    def _halve(self, fusion: Fusion, held: Range, block: Sequence[int]) -> tuple[Range, Range]:
        """Combines one half of what is held with the partner's; returns that half and the one that was given away.

        Args:
            held: the range of elements that both partners hold.
            block: ranks with which to add products, one after the other, so that they add up to the block's products;
                the last one is the partner.
        """
        middle = (held[0] + held[1]) // 2
        lower = self.rank < block[-1]
        kept, given = (held[0], middle), (middle, held[1])
        if not lower:
            kept, given = given, kept
        mine = fusion.pieces(*kept)
        theirs = self._receive_memory([piece.values for piece in mine])
        products = torch.zeros(len(fusion.tensors), 3, dtype=torch.float64, device=fusion.tensors[0].device)
        workspace = gram_workspace(products.device, max(map(torch.numel, theirs), default=1))
        works = self.messages.start(block[-1], [piece.values for piece in fusion.pieces(*given)], theirs)
        for arrived, (piece, other) in enumerate(zip(mine, theirs, strict=True)):
            wait(works[arrived : arrived + 1])
            a, b = (piece.values, other) if lower else (other, piece.values)
            for index, start, end in piece.parts:
                products[index] = pair_products(a[start:end], b[start:end], workspace)
        wait(works[len(mine) :])
        for partner in block:
            products = products + self.messages.partner_values(partner, products)  # the same bits on both sides
        coefficients = pair_coefficients(products if lower else products.flip(-1))
        factors = coefficients.tolist() if coefficients.device.type == "cpu" else coefficients
        for piece, other in zip(mine, theirs, strict=True):
            for index, start, end in piece.parts:
                combine(piece.values[start:end], other[start:end], factors[index])
        return kept, given

    def _exchange(self, fusion: Fusion, partner: int, send: Range = (0, 0), receive: Range = (0, 0)) -> None:
        sent, received = ([piece.values for piece in fusion.pieces(*each)] for each in (send, receive))
        self.messages.exchange(partner, sent, received)

    def _receive_memory(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors of these sizes to receive into. Their memory is kept: new memory is slow at first touch."""
        if not mine:
            return []
        sizes, like = [values.numel() for values in mine], mine[0]
        memory = self._received.get((like.dtype, like.device), like[:0])
        if memory.numel() < sum(sizes):
            self._received[like.dtype, like.device] = memory = torch.empty(
                sum(sizes), dtype=like.dtype, device=like.device
            )
        return list(memory[: sum(sizes)].split(sizes))


def check_dense(tensors: Sequence[Tensor]) -> None:
    """Checks that Adasum can combine these tensors.

    Raises:
        ConfigurationError: a tensor is sparse or not floating-point.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise ConfigurationError(
                f"Adasum needs dense floating-point gradients, and one is {tensor.layout}, {tensor.dtype}: "
                "build embeddings with sparse=False"
            )
