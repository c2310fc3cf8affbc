"""DQ-SGD: stochastic rounding to levels of the norm, with a number of bits that follows the norm."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs import bits, blocks
from fairseq_async.algorithms.codecs.codec import Codec, Vector, check_finite, check_length, check_parameter, from_bytes
from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError

_FEWEST, _MOST = 2, 8
_LARGEST = torch.finfo(torch.float32).max
_AT_A_TIME = 1 << 16
_IN_BLOCKS = 0x80  # flag beside B in the first byte of a body: the norms are those of blocks


class DQSGD(Codec):
    """DQ-SGD (Yan et al. 2021, arXiv 2107.14575): QSGD with a number of bits that follows the norm of the gradient.

    Each value of a tensor becomes q · |g| / s with s = 2^(B−1) − 1 levels of the tensor's norm |g|, where q is one of
    the two whole numbers next to g_j · s / |g|, drawn so that its mean is exact: so there is no residual.
    B = log₂(t · ‖g‖ + 1) + 1, rounded, in 2 … 8, with the norm ‖g‖ of the whole vector: the paper's rule for losses
    that are not convex. t is chosen so that the first gradient that is not 0 has ``bits`` bits.

    Where n values share a norm, most of them are far below the first level, and the noise of their rounding has up to
    √n / s times the energy of the gradient: hundreds of times in a large tensor. ``block`` makes n small; QSGD (arXiv
    1610.02132) calls a block a bucket. ``norm="max"`` divides by the largest absolute value, max|g_j| in place of |g|,
    as QSGD's experiments do: levels are then |g| / max|g_j| times as close, about three times in blocks of 64 normally
    distributed values.

    Body: B (one byte; with blocks 128 more, and their length, u32), the norms (fp32), q + s of each value, in B bits.

    Args:
        bits: number of bits of a value in the first gradient.
        block: number of neighbouring values of a tensor that share a norm; None for all values of the tensor.
        norm: ``"l2"`` or ``"max"``. B follows the L2 norm of the whole vector in either case.

    Attributes:
        t: t of the formula; None before the first gradient.
    """

    number = 6
    biased = False
    by_tensor = True

    def __init__(self, bits: int = 4, block: int | None = None, norm: Literal["l2", "max"] = "l2") -> None:
        check_parameter("bits", bits, _FEWEST, _MOST)
        if block is not None:
            check_parameter("block", block, 1, 1 << 20)
        self.bits, self.block, self.norm = bits, block, norm
        self.t: float | None = None
        self.assumption = f"{bits} bits a value, as at first"

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        return header_bytes(len(sizes)) + self._head_bytes(sizes) + bits.packed_bytes(sum(sizes), self.bits)

    def bits_for(self, norm: float) -> int:
        """Returns B for a vector of this norm."""
        if self.t is None:
            return self.bits
        return min(max(round(math.log2(self.t * norm + 1) + 1), _FEWEST), _MOST)

    def state_dict(self) -> State:
        return {"t": self.t}

    def load_state_dict(self, state: State) -> None:
        self.t = state["t"]

    def _pack(self, vector: Vector) -> list[Bytes]:
        check_finite(vector.values)
        exact = [self._norms(values) for values, _ in vector.tensors()]
        whole = math.hypot(*(norm for own in exact for norm in own))
        if self.t is None and whole > 0:
            self.t = (2 ** (self.bits - 1) - 1) / whole
        width = self.bits_for(whole)
        generator = torch.Generator().manual_seed(vector.seed)
        norms = [self._divisors(values, own) for (values, _), own in zip(vector.tensors(), exact, strict=True)]
        codes, end = np.empty(vector.values.numel(), np.uint16), 0
        for (values, _), own in zip(vector.tensors(), norms, strict=True):
            start, end = end, end + values.numel()
            self._draw(codes[start:end], values, own, 2 ** (width - 1) - 1, generator)
        head = bytes([width])
        if self.block is not None:
            head = bytes([width | _IN_BLOCKS]) + self.block.to_bytes(4, "little")
        return [head, *(own.tobytes() for own in norms), bits.pack(codes, width)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        width = self._width(body)
        size, start = sum(sizes), self._head_bytes(sizes)
        check_length(body, start + bits.packed_bytes(size, width))
        counts = [self._count_norms(size) for size in sizes]
        norms = from_bytes(body[start - 4 * sum(counts) : start], torch.float32)
        if not ((norms >= 0) & (norms <= _LARGEST)).all():
            raise CodecError("a norm in a payload is NaN, below 0 or Inf")
        levels = 2 ** (width - 1) - 1
        codes = bits.unpack(body[start:], size, width)
        if codes.max(initial=0) > 2 * levels:
            raise CodecError("a value in a payload is above its norm")
        shares = torch.from_numpy(codes.astype(np.float32)).sub_(levels).div_(levels)
        for view, own in zip(shares.split(sizes), norms.split(counts), strict=True):
            blocks.scale_(view, own, self.block or max(1, view.numel()))
        return shares

    def _width(self, body: memoryview) -> int:
        """Returns B of a body, after a check that its blocks have the right length."""
        first = body[0] if body.nbytes else 0
        given = int.from_bytes(body[1:5], "little") if first & _IN_BLOCKS else None
        if given != self.block:
            raise CodecError(f"a payload with a norm for {_named(given)}: {_named(self.block)} was expected")
        width = first & ~_IN_BLOCKS
        if not _FEWEST <= width <= _MOST:
            raise CodecError(f"a payload of {width} bits a value: {_FEWEST} to {_MOST} are sent")
        return width

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return self._head_bytes(sizes) + bits.packed_bytes(sum(sizes), _MOST)

    def _head_bytes(self, sizes: Sequence[int]) -> int:
        return (1 if self.block is None else 5) + 4 * sum(map(self._count_norms, sizes))

    def _count_norms(self, size: int) -> int:
        return 1 if self.block is None else blocks.count_blocks(size, self.block)

    def _parts(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Returns runs of neighbouring values of a tensor, each with the slice of the norms that belong to it."""
        if self.block is not None:
            return blocks.parts(size, self.block)
        return ((slice(begin, begin + _AT_A_TIME), slice(0, 1)) for begin in range(0, size, _AT_A_TIME))

    def _norms(self, values: Tensor) -> NDArray[np.float64]:
        """Returns L2 norms in float64; numpy adds in one order, whatever the number of threads."""
        if self.block is None:
            parts = [np.square(values[part].numpy(), dtype=np.float64).sum() for part, _ in self._parts(values.numel())]
            return np.array([math.sqrt(math.fsum(parts))])
        norms = np.empty(self._count_norms(values.numel()))
        for part, here in self._parts(values.numel()):
            squares = np.square(blocks.rows(values[part], self.block).numpy(), dtype=np.float64)
            norms[here] = np.sqrt(squares.sum(axis=1))
        return norms

    def _divisors(self, values: Tensor, exact: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns the norms by which the values are divided, as they are sent, for a tensor with these L2 norms."""
        if self.norm == "l2":
            return exact.clip(max=_LARGEST).astype("<f4")
        if self.block is None:
            return values.abs().amax(dim=0, keepdim=True).numpy() if values.numel() else np.zeros(1, "<f4")
        return blocks.largest(values, self.block).numpy()

    def _draw(
        self,
        codes: NDArray[np.uint16],
        values: Tensor,
        norms: NDArray[np.float32],
        levels: int,
        generator: torch.Generator,
    ) -> None:
        """Rounds each value at random to one of the two levels next to it. A tensor of zeros draws as many numbers."""
        wide = torch.from_numpy(norms).double()
        rates = torch.where(wide > 0, levels / wide, 0.0)
        for part, here in self._parts(values.numel()):
            count = values[part].numel()
            drawn = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
            own = rates[here] if self.block is None else rates[here].repeat_interleave(self.block)
            exact = values[part].double().mul_(own[: drawn.numel()])
            lower = exact.floor()
            rounded = lower + (drawn < exact - lower)
            codes[part] = rounded.clamp_(-levels, levels).add_(levels).numpy().astype(np.uint16)


def _named(block: int | None) -> str:
    return "a tensor" if block is None else f"{block} values"
