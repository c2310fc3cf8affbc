"""What this project asks of Linux and glibc beyond Python's standard library."""

import ctypes
import mmap
import os
import signal

_NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold=0x20000"


def trim() -> None:
    """Gives memory that is free between blocks in use back to the system; without glibc it does nothing.

    An optimizer makes its state at its first step, tensor by tensor, with temporaries of the same sizes in between:
    the holes that these leave amount to one more copy of the parameters.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def give_back(address: int, size: int) -> None:
    """Gives the whole pages within a piece of this process's own memory back to the system.

    Hazard: nobody may read the piece any more. Its allocator does not know, and may use it again.
    """
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + size) // page * page
    libc = ctypes.CDLL(None)
    if begin < end and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Lets the kernel send this process a signal when its parent ends, however that ends (Linux).

    Args:
        parent: its process; if that has ended already, so does this.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def environment() -> dict[str, str]:
    """What a process needs at its start for fast copies: glibc then stores more than 128 KiB past the cache.

    A process that copies parameters does not read the copy: to bring its lines into the cache first would double the
    work.
    """
    given = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{given}:{_NON_TEMPORAL}" if given else _NON_TEMPORAL}
