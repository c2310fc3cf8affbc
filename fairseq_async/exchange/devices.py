"""Copies between a flat vector in memory and a model on a device, if possible asynchronously to the process."""

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fairseq_async.exchange.copying import pack
from fairseq_async.exchange.gpu_memory import IPC

logger = logging.getLogger(__name__)


class Transfer(Protocol):
    """A copy on its way; a CUDA event has this interface."""

    def synchronize(self) -> None:
        """Waits until the copy is done, but not for work that was begun after it."""


class Device(Protocol):
    """The device of a model's tensors. ``flat`` is a flat fp32 vector in memory, such as a worker's slot.

    Attributes:
        asynchronous: whether copies are made while the process goes on, so that it pays to begin them early.
    """

    asynchronous: bool

    @property
    def gpu(self) -> str:
        """The name of the GPU, the same in every process; empty for memory."""

    def pin(self, name: str, flat: Tensor) -> None:
        """Pins ``flat``, so that the device accesses it directly; unpins the vector that had this name before."""

    def begin(self, flat: Tensor, tensors: Iterable[Tensor], factor: float = 1.0) -> Transfer:
        """Begins flat ← factor · tensors, end to end, with their values at this point of the current stream.

        Hazard: nobody may read or write ``flat`` before the transfer is synchronized. The tensors may change at once.

        Raises:
            ValueError: the tensors have more elements than ``flat``.
        """

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors in memory: themselves if they are there, else copies that are valid until the next
        call."""

    def upload(self, flat: Tensor) -> Tensor:
        """Returns ``flat`` on the model's device, for later work on the current stream; ``flat`` may change at once."""


def device_of(tensors: Sequence[Tensor]) -> Device:
    """Returns the GPU on which all of these tensors are, or else :data:`PLAIN`, which copies tensors of any device."""
    places = {tensor.device for tensor in tensors}
    place = places.pop() if len(places) == 1 else None
    return CudaDevice(place) if place is not None and place.type == "cuda" else PLAIN


class _Arrived:
    """A transfer that is done already."""

    def synchronize(self) -> None:
        """Does nothing."""


ARRIVED = _Arrived()


class PlainDevice:
    """Synchronous copies: for a model in memory, or for a flat vector on the model's own device."""

    asynchronous, gpu = False, ""

    def pin(self, name: str, flat: Tensor) -> None:
        """Does nothing: the process itself copies."""

    def begin(self, flat: Tensor, tensors: Iterable[Tensor], factor: float = 1.0) -> Transfer:
        """See :meth:`Device.begin`; the products are fp32."""
        if flat.is_cpu:
            pack(flat, tensors if factor == 1.0 else (each.float() * factor for each in tensors))
        else:  # two kernels in place of two for each tensor
            pack(flat, tensors)
            if factor != 1.0:
                flat.mul_(factor)
        return ARRIVED

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors themselves."""
        return list(tensors)

    def upload(self, flat: Tensor) -> Tensor:
        """Returns ``flat`` itself."""
        return flat


PLAIN = PlainDevice()


class CudaDevice:
    """A GPU. One fused copy flattens the model there, and one transfer each way moves it, on a CUDA stream of its own.

    The order is kept without synchronising the device. The transfer's stream waits for the current stream, on which
    autograd has computed the gradients and the model is flattened. The process waits for the event after the transfer
    before anybody may read the received vector or change the sent one. The current stream waits for that event before
    it reads the vector on the GPU. That fp32 copy on the GPU, 4 bytes per parameter, belongs to the current stream and
    goes back to torch's allocator after each transfer; ``record_stream`` keeps it until the other stream has used it.

    A vector that cannot be pinned is transferred all the same: CUDA then returns when it has read or written it.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging = torch.empty(0)
        self._given: dict[str, Tensor] = {}  # the last vector of each name, whether it could be pinned or not
        # Holds each registered vector, so that its memory is not unmapped before it is unregistered.
        self._pinned: dict[str, Tensor] = {}
        # Not at exit: the driver unregisters then, and CUDA may be gone before Python's last functions run.
        weakref.finalize(self, _unpin_all, self._stream, self._pinned).atexit = False

    @property
    def gpu(self) -> str:
        return IPC.name(self._device)

    def pin(self, name: str, flat: Tensor) -> None:
        """Registers a vector as pinned memory, at the first call with this vector."""
        before = self._given.get(name)
        if before is not None and before.data_ptr() == flat.data_ptr():
            return
        if name in self._pinned:
            _unpin(self._stream, self._pinned.pop(name))
        self._given[name] = flat
        if _register(flat, self._device):
            self._pinned[name] = flat

    def begin(self, flat: Tensor, tensors: Iterable[Tensor], factor: float = 1.0) -> Transfer:
        """See :meth:`Device.begin`."""
        room = torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)
        pack(room, tensors)
        if factor != 1.0:
            room.mul_(factor)
        return self._copy(flat, room, room)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies in pinned memory, which this device keeps: 4 bytes per element."""
        sizes = [tensor.numel() for tensor in tensors]
        if self._staging.numel() != sum(sizes):
            self._staging = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
            self.pin("staging", self._staging)
        self.begin(self._staging, tensors).synchronize()
        return [part.view(each.shape) for part, each in zip(self._staging.split(sizes), tensors, strict=True)]

    def upload(self, flat: Tensor) -> Tensor:
        """See :meth:`Device.upload`. The process waits until ``flat`` is read, since a reader of published parameters
        then compares the seqlock. Work of the current stream on the result follows the transfer."""
        room = torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)
        there = self._copy(room, flat, room)
        torch.cuda.current_stream(self._device).wait_event(there)
        there.synchronize()
        return room

    def _copy(self, destination: Tensor, source: Tensor, room: Tensor) -> torch.cuda.Event:
        """Begins the transfer between memory and ``room``, which the current stream has allocated.

        The transfer waits for the current stream in both directions: that may still read memory that the allocator has
        given to ``room``.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        room.record_stream(self._stream)
        event = torch.cuda.Event(blocking=True)  # the process leaves its core to others while it waits
        self._stream.record_event(event)
        return event


def _register(flat: Tensor, device: torch.device) -> bool:
    """Pins the vector's memory; returns whether it is pinned now."""
    if not flat.numel():
        return False
    with torch.cuda.device(device):
        failure = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        if not failure:
            return True
        logger.warning("%d bytes cannot be pinned (CUDA error %d): copies to the GPU are slower", flat.nbytes, failure)
        _clear_error(device)
    return False


def _clear_error(device: torch.device) -> None:
    """Clears the error that CUDA keeps of a failed call: torch asks for it after each kernel, here a dummy one."""
    try:
        torch.empty(1, device=device).fill_(0.0)
    except RuntimeError:
        pass


def _unpin(stream: torch.cuda.Stream, flat: Tensor) -> None:
    stream.synchronize()  # a transfer may be on its way, if the worker was interrupted or its server has come back
    with torch.cuda.device(stream.device):
        torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())


def _unpin_all(stream: torch.cuda.Stream, pinned: dict[str, Tensor]) -> None:
    while pinned:
        _unpin(stream, pinned.popitem()[1])
