"""Memory for the vectors that codecs make: in huge pages, which cost a fraction of the page faults."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 8 << 20  # below, the allocator has memory at hand


def new_vector(size: int) -> Tensor:
    """A flat fp32 vector of any content. The kernel gives it huge pages where it has them, for it is written at once.

    A page fault for each 4 KiB of a large vector costs twice what it costs to write it.
    """
    if 4 * size < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size)
    memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it open
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)
