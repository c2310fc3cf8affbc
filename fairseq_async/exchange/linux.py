"""Calls to Linux and glibc that Python's standard library does not have."""

import ctypes
import mmap
import os
import signal

_NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold=0x20000"


def trim() -> None:
    """Returns free memory between blocks in use to the system; without glibc it does nothing.

    An optimizer allocates its state at its first step, tensor by tensor, with temporaries of the same sizes in between:
    the holes that these leave amount to one more copy of the parameters.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def give_back(address: int, size: int) -> None:
    """Returns the whole pages within a piece of this process's own memory to the system.

    Hazard: the content is lost, so nobody may read the piece any more. Its allocator does not know of this, and may use
    the memory again.
    """
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + size) // page * page
    libc = ctypes.CDLL(None)
    if begin < end and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Lets the kernel send this process a signal when its parent ends, however that ends (Linux).

    Args:
        parent: id of the parent's process; if the parent has ended already, the signal is sent at once.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def environment() -> dict[str, str]:
    """Returns the environment that a process needs at its start for fast copies: with it, glibc copies more than 128
    KiB with stores that bypass the cache.

    A process that copies parameters does not read the copy: to load its lines into the cache first would double the
    work.
    """
    given = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{given}:{_NON_TEMPORAL}" if given else _NON_TEMPORAL}
