"""Copies of whole models on one machine."""

from collections.abc import Iterable, Iterator, Sequence
from ctypes import memmove

import torch
from torch import Tensor


def copy(destination: Tensor, source: Tensor) -> None:
    """``destination.copy_(source)``; between fp32 tensors on the CPU through the C library, with the tunables of
    :func:`~fairseq_async.exchange.linux.environment`."""
    unpack([destination], source.detach().reshape(-1))


def pack(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """``flat`` ← the tensors, of any shape and device, end to end; those that lie there stay.

    Raises:
        ValueError: they are more than there is room for.
    """
    if not flat.is_cpu:
        return copy_fused(*_views(flat, tensors))
    here = flat.data_ptr() if _in_memory(flat) else None
    for start, tensor in _placed(flat, tensors):
        if here is not None and _in_memory(tensor):
            _move(here + 4 * start, tensor.data_ptr(), 4 * tensor.numel())
        else:
            flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())


def unpack(tensors: Iterable[Tensor], flat: Tensor) -> None:
    """The tensors ← ``flat``.

    Raises:
        ValueError: it has less than they take.
    """
    if not flat.is_cpu:
        return copy_fused(*reversed(_views(flat, tensors)))
    here = flat.data_ptr() if _in_memory(flat) else None
    for start, tensor in _placed(flat, tensors):
        if here is not None and _in_memory(tensor):
            _move(tensor.data_ptr(), here + 4 * start, 4 * tensor.numel())
        else:
            tensor.detach().copy_(flat[start : start + tensor.numel()].view(tensor.shape))


@torch.no_grad()
def copy_fused(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each destination ← its source; on a GPU one kernel for many tensors, where both lie there without gaps."""
    if destinations:  # torch refuses empty lists
        torch._foreach_copy_(list(destinations), list(sources))


def _views(flat: Tensor, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors' places in ``flat``, and the tensors."""
    placed = list(_placed(flat, tensors))
    views = [flat[start : start + tensor.numel()].view(tensor.shape) for start, tensor in placed]
    return views, [tensor for _, tensor in placed]


def _move(destination: int, source: int, size: int) -> None:
    if destination != source:
        memmove(destination, source, size)


def _placed(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    start, size = 0, flat.numel()
    for tensor in tensors:
        end = start + tensor.numel()
        if end > size:
            raise ValueError(f"{size} numbers are not enough for these tensors")
        yield start, tensor
        start = end


def _in_memory(tensor: Tensor) -> bool:
    """Whether it is a plain array in memory: a model has hundreds, and views of each cost more than most copies."""
    return tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
