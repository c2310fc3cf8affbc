"""A GPU in the place of torch.cuda, whose own stream runs late: as late as events and other streams allow.

The model and what is called the GPU's memory are ordinary tensors; what the current stream gets is done at once. A copy
on the other stream is done when somebody waits for it and not before, so that whoever does not wait sees old numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_async.exchange.devices import CudaDevice

_CPU = torch.device("cpu")
_READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default


class FakeCuda(TorchDispatchMode):
    """What :class:`CudaDevice` calls, and what has been called. As a context it counts numbers that are read.

    Attributes:
        to_memory, to_gpu: transfers each way, between the GPU and pinned memory.
        unpinned: transfers of memory that is not pinned, in which CUDA makes the process wait.
        event_waits: of the process, for one event.
        synchronisations: of the process with a whole stream or device, or by reading a number of the GPU's.
        pinned: addresses of registered vectors, and their bytes.
        refuses: whether nothing more can be registered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_memory = self.to_gpu = self.unpinned = self.event_waits = self.synchronisations = 0
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.recorded: list[int] = []  # addresses of memory that the allocator keeps for the other stream
        self.streams: list[FakeStream] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.synchronisations += func is _READS_A_NUMBER and args[0].is_floating_point()  # not shared memory's counters
        return func(*args, **(kwargs or {}))

    @property
    def late(self) -> int:
        """Transfers that nobody has waited for."""
        return sum(len(stream.queue) for stream in self.streams)

    def count(self, destination: Tensor, source: Tensor) -> None:
        """One transfer."""
        down, up = destination.data_ptr() in self.pinned, source.data_ptr() in self.pinned
        self.to_memory += down
        self.to_gpu += up
        self.unpinned += not (down or up)

    def register(self, address: int, size: int, flags: int) -> int:
        """cudaHostRegister"""
        overlaps = any(address < start + length and start < address + size for start, length in self.pinned.items())
        if self.refuses or overlaps:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """cudaHostUnregister"""
        assert not self.late, "memory is unregistered while a transfer uses it"
        del self.pinned[address]
        return 0


class FakeStream:
    """A stream, which begins nothing by itself."""

    device = _CPU

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.issued, self.done = cuda, 0, 0
        self.queue: list[Callable[[], None]] = []
        self.behind_current = False  # whether the next copy waits for what the current stream has
        cuda.streams.append(self)

    def run_to(self, count: int) -> None:
        """Does the first so many of all copies."""
        while self.done < count:
            self.queue.pop(0)()
            self.done += 1

    def wait_stream(self, other: Any) -> None:
        """The other is the current one, whose work is done."""
        assert isinstance(other, CurrentStream)
        self.behind_current = True

    def record_event(self, event: "FakeEvent") -> "FakeEvent":
        """Behind what was issued so far."""
        event.stream, event.place = self, self.issued
        return event

    def synchronize(self) -> None:
        """The process waits for all of it."""
        self.cuda.synchronisations += 1
        self.run_to(self.issued)


class CurrentStream:
    """Does its work at once, after what it is told to wait for."""

    def wait_event(self, event: "FakeEvent") -> None:
        """What comes now is done after the event."""
        event.stream.run_to(event.place)


class FakeEvent:
    """A place in a stream."""

    stream: FakeStream
    place: int

    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "the process would spin on its core"

    def synchronize(self) -> None:
        """The process waits."""
        self.stream.cuda.event_waits += 1
        self.stream.run_to(self.place)


class _Late(TorchDispatchMode):
    """Copies go into the queue of a stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        destination, source, non_blocking = args
        assert non_blocking and destination.dtype is source.dtype and destination.is_contiguous()
        assert self.stream.behind_current, "the copy does not wait for the current stream"
        self.stream.behind_current = False
        self.stream.cuda.count(destination, source)
        self.stream.queue.append(lambda: func(destination, source))
        self.stream.issued += 1
        return destination


@contextmanager
def _stream(stream: FakeStream) -> Iterator[None]:
    with _Late(stream):
        yield


@contextmanager
def _device(device: object) -> Iterator[None]:
    yield


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts a fake GPU in the place of torch.cuda, and every model on it that is made from now on."""
    cuda, current = FakeCuda(), CurrentStream()
    runtime = SimpleNamespace(cudaHostRegister=cuda.register, cudaHostUnregister=cuda.unregister)
    patch.setattr(torch.cuda, "Stream", lambda device: FakeStream(cuda))
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "current_stream", lambda device: current)
    patch.setattr(torch.cuda, "stream", _stream)
    patch.setattr(torch.cuda, "device", _device)
    patch.setattr(torch.cuda, "cudart", lambda: runtime)
    patch.setattr(Tensor, "record_stream", lambda self, stream: cuda.recorded.append(self.data_ptr()))
    patch.setattr("fairseq_async.worker.replica.device_of", lambda tensors: CudaDevice(_CPU))
    return cuda
