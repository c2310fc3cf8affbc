"""The memory that the C library keeps."""

import ctypes


def trim() -> None:
    """Gives back to the system what is free between the blocks in use; where the C library is not glibc, nothing.

    An optimizer makes its state at its first step, tensor by tensor, with temporaries of the same sizes in between:
    the holes that these leave amount to one more copy of the parameters.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
