"""Copies of whole models on one machine."""

import os

import numpy as np
import torch
from torch import Tensor

_NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold=0x20000"


def copy(destination: Tensor, source: Tensor) -> None:
    """``destination.copy_(source)``; between fp32 tensors on the CPU through the C library, see :func:`environment`."""
    if _in_memory(destination) and _in_memory(source):
        np.copyto(destination.detach().numpy(), source.detach().numpy())
    else:
        destination.detach().copy_(source)


def _in_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32


def environment() -> dict[str, str]:
    """What a process needs at its start for fast copies: glibc then stores more than 128 KiB past the cache.

    Who copies parameters does not read the copy: bringing its lines into the cache first is half of the work.
    """
    given = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{given}:{_NON_TEMPORAL}" if given else _NON_TEMPORAL}
