"""Copies whole models on one machine, between flat vectors and lists of tensors."""

from collections.abc import Iterable, Iterator, Sequence
from ctypes import memmove

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

_NOT_ENOUGH = "{} numbers are not enough for these tensors"


def copy(destination: Tensor, source: Tensor) -> None:
    """Does ``destination.copy_(source)``; between fp32 tensors on the CPU with the C library's ``memmove``, which
    :func:`~fairseq_async.exchange.linux.environment` tunes."""
    unpack([destination], source.detach().reshape(-1))


def pack(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """``flat`` ← the tensors, of any shape and device, end to end; a tensor that lies in its place is not copied.

    Raises:
        ValueError: the tensors have more elements than ``flat``.
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
        ValueError: the tensors have more elements than ``flat``.
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
    """Each destination ← its source; one GPU kernel copies many tensors if all are on the GPU and contiguous."""
    if destinations:  # torch refuses empty lists
        torch._foreach_copy_(list(destinations), list(sources))


def _views(flat: Tensor, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the views of ``flat`` for the tensors, and the tensors."""
    given = list(tensors)
    if sum(tensor.numel() for tensor in given) > flat.numel():
        raise ValueError(_NOT_ENOUGH.format(flat.numel()))
    return list(_unflatten_dense_tensors(flat, given)), given  # made by torch: by Python they take longer than the copy


def _move(destination: int, source: int, size: int) -> None:
    if destination != source:
        memmove(destination, source, size)


def _placed(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    start, size = 0, flat.numel()
    for tensor in tensors:
        end = start + tensor.numel()
        if end > size:
            raise ValueError(_NOT_ENOUGH.format(size))
        yield start, tensor
        start = end


def _in_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a contiguous fp32 array in memory, which is copied by address: a model has hundreds of
    tensors, and making views of them would cost more than most of the copies."""
    return tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
