"""Memory for the vectors that codecs make, in huge pages, which cause a fraction of the page faults."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 8 << 20  # below, the allocator has memory at hand


def new_vector(size: int) -> Tensor:
    """Returns a new flat fp32 vector with arbitrary content, on the CPU, in huge pages where the kernel has them.

    The vector is to be written at once: a page fault for each 4 KiB would cost twice what it costs to write it.
    """
    if 4 * size < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.float32, device="cpu")
    memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it open
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)
