"""Memory of one process that other processes on the same machine can map."""

import mmap
import os
import secrets
import stat

import torch
from torch import Tensor

_HEADER = 64  # bytes in front of the data; the first 8 hold the secret, by which a reader recognises the buffer


class SharedBuffer:
    """Anonymous memory that other processes of the same user on this machine can map.

    The memory needs no name and no room in ``/dev/shm``, and is gone with the last process that has it mapped.

    Args:
        nbytes: size of the data.

    Raises:
        OSError: there is no room for it.
    """

    descriptor = -1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("adasum")
        os.posix_fallocate(self.descriptor, 0, _HEADER + nbytes)
        self.secret = secrets.randbits(62)
        memory = torch.frombuffer(mmap.mmap(self.descriptor, _HEADER + nbytes), dtype=torch.int64, count=1)
        memory[0] = self.secret

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def address(self) -> list[int]:
        """Returns the arguments with which another process calls :func:`open_buffer`."""
        return [os.getpid(), self.descriptor, self.nbytes, self.secret]


def open_buffer(process: int, descriptor: int, nbytes: int, secret: int) -> Tensor | None:
    """Maps the data of another process's :class:`SharedBuffer`, as bytes.

    Returns:
        None where it cannot be opened from here: its process is on another machine, in another container, or of
        another user.
    """
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER + nbytes:
            return None  # the owner is on another machine, and here the same numbers name another file
        memory = torch.frombuffer(mmap.mmap(file, _HEADER + nbytes), dtype=torch.uint8)
    finally:
        os.close(file)
    return memory[_HEADER:] if int(memory[:8].view(torch.int64)) == secret else None
