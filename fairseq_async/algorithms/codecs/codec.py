"""What all codecs have in common: checks at both ends, and the order of what happens in between."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes, seal, unseal
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError


@dataclass(frozen=True)
class Vector:
    """What is to be encoded.

    Attributes:
        values: flat, fp32, contiguous, on the CPU.
        newest: the part of them that has come last, without what was left of earlier ones; of the same size.
        sizes: number of values of each tensor in it.
        seed: of what is drawn.
    """

    values: Tensor
    newest: Tensor
    sizes: tuple[int, ...]
    seed: int

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and newest part of one tensor after another."""
        return zip(self.values.split(self.sizes), self.newest.split(self.sizes), strict=True)


class Codec(ABC):
    """Makes bytes of a vector, and an approximation of the vector of the bytes.

    Decoding gives the same bits on every machine and with any number of threads: each value is made by itself, and no
    sum has an order that is open.

    Attributes:
        number: names the codec in a payload.
        biased: the mean of what is decoded is not what was encoded: what was lost has to be sent later, by an
            :class:`ErrorFeedback`.
        by_tensor: each tensor is encoded for itself; otherwise the vector is one.
        assumption: of :meth:`usual_bytes`; empty where every payload of a vector is as long.
    """

    number: ClassVar[int]
    biased: ClassVar[bool] = True
    by_tensor: ClassVar[bool] = False
    assumption: str = ""

    def encode(
        self, tensor: Tensor, seed: int = 0, sizes: Sequence[int] | None = None, newest: Tensor | None = None
    ) -> bytes:
        """The payload of a tensor, which is taken as a flat vector in fp32.

        Args:
            seed: of stochastic rounding, where there is one: equal seeds draw equal numbers.
            sizes: number of values of each tensor in the vector; None for one tensor.
            newest: what of the tensor is not residual; None for all of it.

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
        """The vector of a payload: flat, fp32, of ``size`` values.

        Args:
            sizes: number of values of each tensor; None for whatever the payload says. Hazard: a tensor without values
                is 12 bytes, and takes longer to look at than to send. Where a stranger chose them, give what they must
                be.

        Raises:
            CodecError: the bytes are no payload of this codec with its parameters and so many values.
        """
        known = tuple(sizes) if sizes is not None and self.by_tensor else None
        return self._unpack(*self._opened(data, size, known))

    def _opened(
        self, data: Bytes, size: int, sizes: tuple[int, ...] | None = None
    ) -> tuple[memoryview, tuple[int, ...]]:
        """The body of a payload of this codec, and the sizes of its tensors."""
        return unseal(data, self.number, size, sizes if self.by_tensor else (size,))

    def most_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the longest payload of a vector of such tensors."""
        own = tuple(sizes) if self.by_tensor else (sum(sizes),)
        return header_bytes(len(own)) + self._most_body_bytes(own)

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of a payload of a vector of such tensors, under :attr:`assumption` where they differ."""
        return self.most_bytes(sizes)

    def state_dict(self) -> State:
        """What later payloads depend on; of most codecs nothing."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027  most codecs have no state
        """Goes on from :meth:`state_dict`."""

    @abstractmethod
    def _pack(self, vector: Vector) -> list[Bytes]:
        """The body of a payload, in parts."""

    @abstractmethod
    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        """The vector of a body."""

    @abstractmethod
    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int: ...


def check_finite(*tensors: Tensor) -> None:
    """Raises a CodecError for NaN and Inf."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]  # NaN where one is NaN
    if not all(torch.isfinite(end) for end in ends):
        raise CodecError("a vector with NaN or Inf cannot be sent")


def check_length(body: memoryview, expected: int) -> None:
    """Raises a CodecError for a body of another length."""
    if body.nbytes != expected:
        raise CodecError(f"a body of {body.nbytes} bytes: {expected} were expected")


def check_parameter(name: str, value: int, least: int, most: int) -> None:
    """Raises a CodecError for a codec's parameter out of its range."""
    if not least <= value <= most:
        raise CodecError(f"{name} is {value}; it must be in [{least}, {most}]")


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor; they stay the tensor's."""
    return (
        memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data).cast("B") if tensor.numel() else memoryview(b"")
    )


def from_bytes(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor of such bytes, copied; numbers are little-endian, as they are on this machine."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to("cpu", torch.float32).contiguous()
