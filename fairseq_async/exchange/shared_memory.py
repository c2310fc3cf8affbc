"""Parameters and updates in memory that server and workers of one machine share."""

import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from fairseq_async.algorithms.threads import copy_in_threads
from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange.copying import copy

DIRECTORY = "/dev/shm"
_PATIENCE = 10.0  # seconds for which one side waits before it considers the other dead


def never() -> bool:
    """Returns False: the server has not ended."""
    return False


class SharedMemory:
    """The published parameters, if a run publishes them, and one slot per worker, each a flat fp32 tensor.

    The server alone writes the published parameters, a worker alone writes its slot. A reader may copy while the
    server publishes: a counter that is odd during a write (a seqlock) tells it to copy again, so it never keeps a
    mixture of two versions, and no reader, even one killed on the way, can hold up the server.

    The file has no name (``O_TMPFILE``): it cannot clash with another job's and is gone with the last process
    that has it open, however that process ends.
    """

    device = torch.device("cpu")

    def __init__(self, descriptor: int, parameters: int, workers: int, publishes: bool) -> None:
        self.parameters, self.workers, self.publishes = parameters, workers, publishes
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, self.nbytes(parameters, workers, publishes))
        # the seqlock's counter, the version, and a random number that names this memory
        self._header = torch.frombuffer(self._map, dtype=torch.int64, count=3)
        self._fence = threading.Lock()

    @staticmethod
    def nbytes(parameters: int, workers: int, publishes: bool = True) -> int:
        before_the_last = mmap.PAGESIZE + _pages(4 * parameters) * (publishes + workers - 1)
        return before_the_last + 4 * parameters

    @classmethod
    def create(cls, parameters: int, workers: int, publishes: bool = True) -> "SharedMemory":
        """Creates the server's side, for up to ``workers`` workers; :meth:`allocate_slot` allocates their slots.

        Raises:
            ExchangeError: there is no room in /dev/shm.
        """
        size = cls.nbytes(parameters, workers, publishes)
        shared = mmap.PAGESIZE + _pages(4 * parameters) * publishes
        try:
            descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
            with ExitStack() as undo:
                undo.callback(os.close, descriptor)
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, shared)
                undo.pop_all()
        except OSError as error:
            raise ExchangeError(_no_room(shared, error)) from error
        memory = cls(descriptor, parameters, workers, publishes)
        memory._header[2] = secrets.randbits(63)
        return memory

    @classmethod
    def attach(cls, path: str, parameters: int, workers: int, publishes: bool = True) -> "SharedMemory":
        """Opens a worker's side; ``path`` is the server's :attr:`path`.

        Raises:
            ConfigurationError: the file is not the server's.
            ExchangeError: the file cannot be opened, or is not of the size that these parameters need.
        """
        file = path.partition(":")[0]
        try:
            descriptor = os.open(file, os.O_RDWR)
        except OSError as error:
            raise ExchangeError(
                f"the server's shared memory {file} cannot be opened: {error.strerror}; start server and "
                "workers as one user in one container"
            ) from error
        if os.fstat(descriptor).st_size != cls.nbytes(parameters, workers, publishes):
            os.close(descriptor)
            raise ExchangeError(f"the server's shared memory {file} is not of the size that this model needs")
        memory = cls(descriptor, parameters, workers, publishes)
        if memory._name != path.partition(":")[2]:
            memory.close()
            raise ConfigurationError(
                f"{file} is not the memory of this run's server, which is in another container with the same network; "
                "let it listen on another address than 127.0.0.1: then parameters go through the network"
            )
        return memory

    @property
    def path(self) -> str:
        """Path at which other processes of the same user open the file, and behind a colon the name of the memory: in
        another container, the same path may be another process's file."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}:{self._name}"

    @property
    def _name(self) -> str:
        file = os.fstat(self._descriptor)
        return f"{file.st_dev:x}-{file.st_ino:x}-{int(self._header[2]):x}"

    @property
    def inode(self) -> int:
        """Identifies the file, which :attr:`path` does not: paths are used again."""
        return os.fstat(self._descriptor).st_ino

    @property
    def published(self) -> Tensor:
        assert self.publishes
        return self._vector(0)

    def allocate_slot(self, worker: int) -> None:
        """Allocates the memory of a worker's slot, so that no write to it can fail.

        Raises:
            ExchangeError: there is no room in /dev/shm.
        """
        size = 4 * self.parameters
        try:
            os.posix_fallocate(self._descriptor, self._offset(self.publishes + worker), size)
        except OSError as error:
            raise ExchangeError(_no_room(size, error)) from error

    def slot(self, worker: int) -> Tensor:
        return self._vector(self.publishes + worker)

    def _vector(self, index: int) -> Tensor:
        count, offset = self.parameters, self._offset(index)
        return torch.frombuffer(self._map, dtype=torch.float32, count=count, offset=offset)

    def _offset(self, index: int) -> int:
        return mmap.PAGESIZE + _pages(4 * self.parameters) * index

    def publish(self, parameters: Tensor, version: int) -> None:
        with self.publication(version):
            copy_in_threads(self.published, parameters, copy)

    @contextmanager
    def publication(self, version: int) -> Iterator[None]:
        """Within it, the parameters of this version are written."""
        self._advance_counter()
        yield
        self._header[1] = version
        self._advance_counter()

    def read(self, copy: Callable[[Tensor], object], gone: Callable[[], bool] = never) -> int:
        """Calls ``copy(published)`` until the server published nothing meanwhile; returns the version that was copied.

        Args:
            gone: returns whether the server has ended.

        Raises:
            ExchangeError: the server has begun a publication and does not complete it.
        """
        return self.while_unchanged(lambda: copy(self.published), gone)

    def while_unchanged(self, copy: Callable[[], object], gone: Callable[[], bool] = never) -> int:
        """Calls ``copy`` as :meth:`read` does."""
        seen, deadline = -1, 0.0
        while True:
            before, version = int(self._header[0]), int(self._header[1])
            self._memory_barrier()
            if before % 2 == 0:
                copy()
                self._memory_barrier()
                if int(self._header[0]) == before:
                    return version
            elif before != seen:  # another publication than the one that this reader waited for
                seen, deadline = before, time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline or gone():
                raise ExchangeError("the server stopped while it published parameters")
            else:
                time.sleep(0.0002)

    def read_once(self, copy: Callable[[Tensor], object]) -> int:
        """Calls ``copy(published)`` once; returns the version that was copied, -1 if the server published meanwhile."""
        before, version = int(self._header[0]), int(self._header[1])
        self._memory_barrier()
        copy(self.published)
        self._memory_barrier()
        return version if before % 2 == 0 and int(self._header[0]) == before else -1

    def settle(self) -> None:
        """Does nothing: a copy is there when the call that makes it returns."""

    def close(self) -> None:
        """Closes the file, once; vectors that are still in use stay mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _advance_counter(self) -> None:
        self._memory_barrier()
        self._header[0] += 1
        self._memory_barrier()

    def _memory_barrier(self) -> None:
        # Taking a lock is a memory barrier: without it a processor with weak ordering (Arm) may move the copy
        # past the counter.
        with self._fence:
            pass


def _pages(size: int) -> int:
    """Rounds up to whole pages: header and vectors share no page, so that each vector can be pinned by itself."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _no_room(size: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return f"{DIRECTORY} cannot be used for shared memory: {error.strerror}"
    disk = os.statvfs(DIRECTORY)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"no room in {DIRECTORY}: parameters and slots need {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free; "
        "enlarge it (in a container: --shm-size)"
    )
