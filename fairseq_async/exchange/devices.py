"""Copies between a flat vector in memory and a model on a device, which may go on by itself while they are made."""

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fairseq_async.exchange.copying import pack

logger = logging.getLogger(__name__)


class Transfer(Protocol):
    """A copy on its way; an event of CUDA is one."""

    def synchronize(self) -> None:
        """Returns when the copy is there; waits for nothing that was begun after it."""


class Device(Protocol):
    """Where a model's tensors are. ``flat`` is a flat fp32 vector in memory, such as a worker's slot.

    Attributes:
        asynchronous: copies are made while the process goes on, so that it pays to begin them early.
    """

    asynchronous: bool

    def pin(self, name: str, flat: Tensor) -> None:
        """Lets the device read and write ``flat`` by itself; what had this name before is let go."""

    def begin(self, flat: Tensor, tensors: Iterable[Tensor], factor: float = 1.0) -> Transfer:
        """Begins flat ← factor · tensors, end to end, as the current stream has them when it comes to this.

        Hazard: nobody may read or write ``flat`` before the transfer is synchronized. The tensors may change at once.

        Raises:
            ValueError: they are more than there is room for.
        """

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in memory, to be read before the next call: themselves, where they are there."""

    def upload(self, flat: Tensor) -> Tensor:
        """``flat`` beside the model's tensors, for what the current stream gets from now on; ``flat`` may change."""


def device_of(tensors: Sequence[Tensor]) -> Device:
    """The GPU on which all of these tensors are; else the device for plain copies, which serves tensors of any kind."""
    places = {tensor.device for tensor in tensors}
    place = places.pop() if len(places) == 1 else None
    return CudaDevice(place) if place is not None and place.type == "cuda" else PLAIN


class _Arrived:
    def synchronize(self) -> None:
        pass


class PlainDevice:
    """Copies that are made when the call returns: a model in memory, or a flat vector that is beside its model."""

    asynchronous = False

    def pin(self, name: str, flat: Tensor) -> None:
        """Nothing: the process itself copies."""

    def begin(self, flat: Tensor, tensors: Iterable[Tensor], factor: float = 1.0) -> Transfer:
        """See :meth:`Device.begin`; the products are fp32."""
        pack(flat, tensors if factor == 1.0 else (each.float() * factor for each in tensors))
        return _Arrived()

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors."""
        return list(tensors)

    def upload(self, flat: Tensor) -> Tensor:
        """``flat``."""
        return flat


PLAIN = PlainDevice()


class CudaDevice:
    """A GPU. The model is flattened there by one fused copy, and goes each way in one transfer, on a stream of its own.

    Order, without a synchronisation of the device: the transfer's stream waits for the current stream, on which
    autograd has left the gradients and where the model is flattened; the process waits for the event behind the
    transfer before it lets anybody read what came, or change what is sent; the current stream waits for that event
    before it reads what was sent. The fp32 copy on the GPU, 4 bytes a parameter, belongs to the current stream and goes
    back to torch's allocator after each transfer; ``record_stream`` keeps it until the other stream has used it.

    A vector that cannot be pinned is transferred all the same: CUDA then returns when it has read it or written it.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging = torch.empty(0)
        # A registered vector is held here, so that its memory is not unmapped before it is unregistered.
        self._pinned: dict[str, Tensor] = {}
        # At the end of the process the driver unregisters; CUDA may be gone before Python's last functions run.
        weakref.finalize(self, _unpin_all, self._stream, self._pinned).atexit = False

    def pin(self, name: str, flat: Tensor) -> None:
        """Registers a vector as pinned memory, at its first call with this vector."""
        before = self._pinned.get(name)
        if before is not None and before.data_ptr() == flat.data_ptr():
            return
        if before is not None:
            _unpin(self._stream, self._pinned.pop(name))
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
        """Copies in pinned memory, which this device keeps: 4 bytes for each of their elements."""
        sizes = [tensor.numel() for tensor in tensors]
        if self._staging.numel() != sum(sizes):
            self._staging = torch.empty(sum(sizes))
            self.pin("staging", self._staging)
        self.begin(self._staging, tensors).synchronize()
        return [part.view(each.shape) for part, each in zip(self._staging.split(sizes), tensors, strict=True)]

    def upload(self, flat: Tensor) -> Tensor:
        """See :meth:`Device.upload`. The process waits until ``flat`` is read: a reader of published parameters must
        then compare the seqlock. What the current stream does with the result goes on behind it."""
        room = torch.empty(flat.numel(), dtype=flat.dtype, device=self._device)
        there = self._copy(room, flat, room)
        torch.cuda.current_stream(self._device).wait_event(there)
        there.synchronize()
        return room

    def _copy(self, destination: Tensor, source: Tensor, room: Tensor) -> torch.cuda.Event:
        """Begins the transfer between ``room``, which is the current stream's, and memory.

        It waits for the current stream each way: room that the allocator gives may still be read there.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        room.record_stream(self._stream)
        event = torch.cuda.Event(blocking=True)  # the process leaves its core to others while it waits
        self._stream.record_event(event)
        return event


def _register(flat: Tensor, device: torch.device) -> bool:
    """Whether the vector's memory is pinned now."""
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
    """CUDA keeps the error of a call for the next who asks, and torch asks after each kernel: here it does in vain."""
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
