"""Copies of whole models on one machine."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold=0x20000"


def copy(destination: Tensor, source: Tensor) -> None:
    """``destination.copy_(source)``; between fp32 tensors on the CPU through the C library, see :func:`environment`."""
    unpack([destination], source.detach().reshape(-1))


def pack(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """``flat`` ← the tensors, of any shape and device, end to end."""
    for part, tensor in _pairs(flat, tensors):
        _assign(part, tensor)


def unpack(tensors: Iterable[Tensor], flat: Tensor) -> None:
    """The tensors ← ``flat``."""
    for part, tensor in _pairs(flat, tensors):
        _assign(tensor, part)


def _pairs(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[Any, Any]]:
    """Each tensor's part of ``flat`` and the tensor: arrays where both are fp32 on the CPU, else tensors.

    A model has hundreds of tensors, and a view of each costs torch more than numpy.
    """
    array = flat.detach().numpy() if _in_memory(flat) else None
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        if array is not None and _in_memory(tensor):
            yield array[start:end].reshape(tensor.shape), tensor.detach().numpy()
        else:
            yield flat[start:end].view(tensor.shape), tensor.detach()
        start = end


def _assign(destination: Any, source: Any) -> None:
    if isinstance(destination, np.ndarray):
        np.copyto(destination, source)
    else:
        destination.copy_(source)


def _in_memory(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype is torch.float32


def environment() -> dict[str, str]:
    """What a process needs at its start for fast copies: glibc then stores more than 128 KiB past the cache.

    Who copies parameters does not read the copy: bringing its lines into the cache first is half of the work.
    """
    given = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{given}:{_NON_TEMPORAL}" if given else _NON_TEMPORAL}
