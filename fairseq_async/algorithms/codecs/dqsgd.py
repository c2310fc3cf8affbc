"""DQ-SGD: stochastic rounding to levels of the norm, in as many bits as the norm deserves."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs import bits
from fairseq_async.algorithms.codecs.codec import Codec, Vector, check_finite, check_length, check_parameter
from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import CodecError

_FEWEST, _MOST = 2, 8
_LARGEST = torch.finfo(torch.float32).max
_AT_A_TIME = 1 << 16


class DQSGD(Codec):
    """Yan et al. 2021 (arXiv 2107.14575): QSGD, whose bits follow the norm of the gradient.

    Each value of a tensor becomes q · |g| / s with s = 2^(B−1) − 1 levels of the tensor's norm |g|, where q is one of
    the two whole numbers next to g_j · s / |g|, drawn so that its mean is right: there is no residual.
    B = log₂(t · ‖g‖ + 1) + 1, rounded, in 2 … 8, with the norm ‖g‖ of the whole vector: the paper's rule where the loss
    is not convex. t is such that the first gradient that is not 0 has ``bits`` bits.

    Body: B (one byte), the norm of each tensor (fp32), q + s of each value, in B bits.

    Args:
        bits: of the values of the first gradient.

    Attributes:
        t: of the formula; None before the first gradient.
    """

    number = 6
    biased = False
    by_tensor = True

    def __init__(self, bits: int = 4) -> None:
        check_parameter("bits", bits, _FEWEST, _MOST)
        self.bits = bits
        self.t: float | None = None
        self.assumption = f"{bits} bits a value, as at first"

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        return header_bytes(len(sizes)) + 1 + 4 * len(sizes) + bits.packed_bytes(sum(sizes), self.bits)

    def bits_for(self, norm: float) -> int:
        """B of a vector of this norm."""
        if self.t is None:
            return self.bits
        return min(max(round(math.log2(self.t * norm + 1) + 1), _FEWEST), _MOST)

    def state_dict(self) -> State:
        return {"t": self.t}

    def load_state_dict(self, state: State) -> None:
        self.t = state["t"]

    def _pack(self, vector: Vector) -> list[Bytes]:
        check_finite(vector.values)
        exact = [_norm(values) for values, _ in vector.tensors()]
        norms = np.array(exact, np.float64).clip(max=_LARGEST).astype("<f4")
        whole = math.hypot(*exact)
        if self.t is None and whole > 0:
            self.t = (2 ** (self.bits - 1) - 1) / whole
        width = self.bits_for(whole)
        generator = torch.Generator().manual_seed(vector.seed)
        codes = np.empty(vector.values.numel(), np.uint16)
        begin = 0
        for (values, _), norm in zip(vector.tensors(), norms, strict=True):
            _draw(values, float(norm), 2 ** (width - 1) - 1, generator, codes[begin : begin + values.numel()])
            begin += values.numel()
        return [bytes([width]), norms.tobytes(), bits.pack(codes, width)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        width = body[0] if body.nbytes else 0
        if not _FEWEST <= width <= _MOST:
            raise CodecError(f"a payload of {width} bits a value: {_FEWEST} to {_MOST} are sent")
        size, start = sum(sizes), 1 + 4 * len(sizes)
        check_length(body, start + bits.packed_bytes(size, width))
        norms = np.frombuffer(body[1:start], "<f4")
        if not ((norms >= 0) & (norms <= _LARGEST)).all():
            raise CodecError("a norm in a payload is NaN, below 0 or Inf")
        levels = 2 ** (width - 1) - 1
        codes = bits.unpack(body[start:], size, width)
        if codes.max(initial=0) > 2 * levels:
            raise CodecError("a value in a payload is above its norm")
        shares = torch.from_numpy(codes.astype(np.float32)).sub_(levels).div_(levels)
        for view, norm in zip(shares.split(sizes), norms, strict=True):
            view.mul_(float(norm))
        return shares

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return 1 + 4 * len(sizes) + bits.packed_bytes(sum(sizes), _MOST)


def _norm(values: Tensor) -> float:
    """The L2 norm in float64; numpy adds in one order, whatever the number of threads."""
    parts = [np.square(part.numpy(), dtype=np.float64).sum() for part in values.split(_AT_A_TIME)]
    return math.sqrt(math.fsum(parts))


def _draw(values: Tensor, norm: float, levels: int, generator: torch.Generator, out: NDArray[np.uint16]) -> None:
    """Rounds each value to one of its two levels. As many numbers are drawn for a tensor of zeros, too."""
    for begin in range(0, values.numel(), _AT_A_TIME):
        part = values[begin : begin + _AT_A_TIME]
        drawn = torch.rand(part.numel(), generator=generator)
        exact = part.double().mul_(levels / norm if norm else 0.0)
        lower = exact.floor()
        rounded = lower + (drawn < exact - lower)
        out[begin : begin + part.numel()] = rounded.clamp_(-levels, levels).add_(levels).numpy().astype(np.uint16)
