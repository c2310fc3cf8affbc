"""The base of all codecs, with the checks at both ends, and functions that codecs share."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes, seal, unseal
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError


@dataclass(frozen=True)
class Vector:
    """A vector to encode.

    Attributes:
        values: all values: flat, fp32, contiguous, on the CPU.
        newest: the newest update in ``values``, without the residual of earlier ones; of the same size.
        sizes: number of values of each tensor in the vector.
        seed: seed of the random numbers that a codec draws.
    """

    values: Tensor
    newest: Tensor
    sizes: tuple[int, ...]
    seed: int

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns the values and the newest part of one tensor after another."""
        return zip(self.values.split(self.sizes), self.newest.split(self.sizes), strict=True)


class Codec(ABC):
    """Encodes a vector as bytes, and decodes the bytes to an approximation of the vector.

    Decoding gives the same bits on every machine and with any number of threads: each value is computed by itself, and
    every sum has a fixed order.

    Attributes:
        number: identifies the codec in a payload.
        biased: whether the mean of decoded vectors differs from the encoded vector. What is lost then has to be sent
            later, by an :class:`ErrorFeedback`.
        by_tensor: whether each tensor is encoded by itself; otherwise the vector is encoded as one tensor.
        assumption: the assumption of :meth:`usual_bytes`; empty where all payloads of a vector have the same length.
    """

    number: ClassVar[int]
    biased: ClassVar[bool] = True
    by_tensor: ClassVar[bool] = False
    assumption: str = ""

    def encode(
        self, tensor: Tensor, seed: int = 0, sizes: Sequence[int] | None = None, newest: Tensor | None = None
    ) -> bytes:
        """Returns the payload of a tensor, which is encoded as a flat vector in fp32.

        Args:
            seed: seed of stochastic rounding, in codecs that have it: equal seeds draw equal numbers.
            sizes: number of values of each tensor in the vector; None for one tensor.
            newest: the newest update in the tensor, without the residual; None where there is no residual.

        Raises:
            CodecError: a value is NaN or Inf, or the sizes do not add up.
        """
        values = _flat(tensor)
        given = tuple(sizes) if sizes is not None and self.by_tensor else (values.numel(),)
        if sum(given) != values.numel():
            raise CodecError(f"the sizes of the tensors add up to {sum(given)}: there are {values.numel()} values")
        latest = values if newest is None else _flat(newest)
        return seal(self.number, given, self._pack(Vector(values, latest, given, seed)))

    def decode(self, data: Bytes, size: int, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns the vector of a payload: flat, fp32, of ``size`` values.

        Args:
            sizes: number of values of each tensor; None accepts those in the payload. Hazard: a tensor without values
                is a few bytes, and takes longer to decode than to send. Give the expected sizes where a stranger may
                have sent the payload.

        Raises:
            CodecError: the bytes are no payload of this codec with its parameters and ``size`` values.
        """
        known = tuple(sizes) if sizes is not None and self.by_tensor else None
        return self._unpack(*self._opened(data, size, known))

    def _opened(
        self, data: Bytes, size: int, sizes: tuple[int, ...] | None = None
    ) -> tuple[memoryview, tuple[int, ...]]:
        """Returns the body of a payload of this codec, and the sizes of its tensors."""
        return unseal(data, self.number, size, sizes if self.by_tensor else (size,))

    def most_bytes(self, sizes: Sequence[int]) -> int:
        """Returns the bytes of the longest payload of a vector with tensors of these sizes."""
        own = tuple(sizes) if self.by_tensor else (sum(sizes),)
        return header_bytes(len(own)) + self._most_body_bytes(own)

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        """Returns the bytes of a usual payload of such a vector, under :attr:`assumption` where payloads differ."""
        return self.most_bytes(sizes)

    def state_dict(self) -> State:
        """Returns the state on which later payloads depend; most codecs have none."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027  most codecs have no state
        """Restores what :meth:`state_dict` returned."""

    @abstractmethod
    def _pack(self, vector: Vector) -> list[Bytes]:
        """Returns the body of a payload, in parts."""

    @abstractmethod
    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        """Returns the vector of a body."""

    @abstractmethod
    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int: ...


def check_finite(*tensors: Tensor) -> None:
    """Raises a CodecError for NaN and Inf."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]  # NaN where one is NaN
    if not all(torch.isfinite(end) for end in ends):
        raise CodecError("a vector with NaN or Inf cannot be sent")


def check_length(body: memoryview, expected: int) -> None:
    """Raises a CodecError for a body that has not the expected number of bytes."""
    if body.nbytes != expected:
        raise CodecError(f"a body of {body.nbytes} bytes: {expected} were expected")


def check_parameter(name: str, value: int, least: int, most: int) -> None:
    """Raises a CodecError for a codec's parameter outside of its range."""
    if not least <= value <= most:
        raise CodecError(f"{name} is {value}; it must be in [{least}, {most}]")


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor, as a view of its memory."""
    return (
        memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data).cast("B") if tensor.numel() else memoryview(b"")
    )


def from_bytes(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with a copy of the bytes; numbers are little-endian, as they are on this machine."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype, device="cpu")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to("cpu", torch.float32).contiguous()


_LEAST_BYTES = 8 << 20  # below, the allocator has memory at hand


def new_vector(size: int) -> Tensor:
    """Returns a new flat fp32 vector with arbitrary content, on the CPU, in huge pages where the kernel has them.

    The vector is to be written at once: a page fault for each 4 KiB would cost twice what it costs to write it.
    """
    if 4 * size < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.float32, device="cpu")
    memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it open
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)
