"""Memory of a process that others on the machine can open."""

import mmap
import os
import secrets
import stat

import torch
from torch import Tensor

_HEADER = 64  # bytes; they begin with a number that only the owner can have told


class Mirror:
    """Memory of this process that others of the same user on the machine can open; gone with the last that has it.

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
        """What :func:`opened` needs."""
        return [os.getpid(), self.descriptor, self.nbytes, self.secret]


def opened(process: int, descriptor: int, nbytes: int, secret: int) -> Tensor | None:
    """The bytes of a mirror; None where it cannot be opened from here: another machine, container or user."""
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER + nbytes:
            return None  # another file, which has this place on this machine
        memory = torch.frombuffer(mmap.mmap(file, _HEADER + nbytes), dtype=torch.uint8)
    finally:
        os.close(file)
    return memory[_HEADER:] if int(memory[:8].view(torch.int64)) == secret else None
