"""A GPU that processes share, in ordinary memory: what a side writes is seen by the other only after it has waited."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fairseq_async.exchange.devices import PlainDevice
from fairseq_async.exchange.gpu_memory import CudaIpc, UnmappedError

NAME = "GPU-fake"


class _Vector:
    """A vector as its server and the process that maps it see it. Both see the same once the writer has waited."""

    def __init__(self, size: int) -> None:
        self.of_server, self.mapped = torch.zeros(size), torch.zeros(size)
        self.last = torch.zeros(size)  # what both have seen last

    def meet(self) -> None:
        """Shows each side what the other has written."""
        for own, other in ((self.of_server, self.mapped), (self.mapped, self.of_server)):
            if not torch.equal(own.nan_to_num(), self.last.nan_to_num()):
                other.copy_(own)
                self.last.copy_(own)


class FakeIpc(CudaIpc):
    """In the place of CUDA's calls.

    Attributes:
        waits: how often a process has waited for the GPU.
        free: bytes that are free.
        unmapped: why nothing can be mapped; empty where it can.
    """

    def __init__(self) -> None:
        self.waits, self.free, self.unmapped = 0, 1 << 40, ""
        self.vectors: list[_Vector] = []
        self._lock = threading.Lock()

    def name(self, device: torch.device) -> str:
        return NAME

    def find(self, name: str) -> torch.device | None:
        return torch.device("cpu") if name == NAME else None

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def allocate(self, size: int, device: torch.device) -> Tensor:
        self.vectors.append(_Vector(size))
        return self.vectors[-1].of_server

    def share(self, vector: Tensor) -> str:
        return str(next(n for n, each in enumerate(self.vectors) if each.of_server.data_ptr() == vector.data_ptr()))

    def open(self, shared: str, size: int) -> Tensor:
        if self.unmapped:
            raise UnmappedError(self.unmapped)
        vector = self.vectors[int(shared)]
        assert vector.mapped.numel() == size
        return vector.mapped

    def wait(self, device: torch.device) -> None:
        with self._lock:
            self.waits += 1
            for vector in self.vectors:
                vector.meet()


@contextmanager
def models_on_it() -> Iterator[FakeIpc]:
    """Within it, every model is on the fake GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairseq_async.exchange.gpu_memory.IPC", ipc := FakeIpc())
        patch.setattr("fairseq_async.server.slots.IPC", ipc)
        patch.setattr(PlainDevice, "gpu", NAME)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield ipc
