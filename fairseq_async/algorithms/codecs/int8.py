"""int8 codec: 8 bits a value."""

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs import blocks
from fairseq_async.algorithms.codecs.codec import (
    Codec,
    Vector,
    as_bytes,
    check_finite,
    check_length,
    check_parameter,
    from_bytes,
    new_vector,
)
from fairseq_async.algorithms.codecs.payload import Bytes
from fairseq_async.errors import CodecError

_LEVELS = 127
_LARGEST_SCALE = 132104.046875 * 2.0**104  # the largest fp32 of which 127 times is finite: max / 127, rounded down


class Int8(Codec):
    """Rounds to x ≈ scale · q with q in −127 … 127 and scale = max|x| / 127 of a block of neighbouring values.

    Body: the length of a block (u32), a scale for each block (fp32), a byte for each value (two's complement).

    Args:
        block: number of neighbouring values that share a scale.
    """

    number = 2

    def __init__(self, block: int = 256) -> None:
        check_parameter("block", block, 1, 1 << 20)
        self.block = block

    def _pack(self, vector: Vector) -> list[Bytes]:
        values, size = vector.values, vector.values.numel()
        largest = new_vector(blocks.count_blocks(size, self.block))
        quantized = new_vector((size + 3) // 4).view(torch.int8)[:size]  # four to a float
        room = blocks.new_room(size, self.block)
        for part, rows in blocks.parts(size, self.block):
            here = blocks.rows(values[part], self.block)
            levels = room[: here.numel()].view_as(here)
            blocks.largest_(largest[rows], here)
            _quantize(here, _scales(largest[rows]), out=levels)
            quantized[part] = levels.view(-1)[: quantized[part].numel()]
        check_finite(largest)
        return [self.block.to_bytes(4, "little"), as_bytes(_scales(largest)), as_bytes(quantized)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        (size,) = sizes
        check_length(body, self._most_body_bytes(sizes))
        scales, quantized = blocks.split(body, size, self.block, _LARGEST_SCALE)
        values = new_vector(size)
        for part, rows in blocks.parts(size, self.block):
            levels = from_bytes(quantized[part], torch.int8)
            if int(levels.min()) < -_LEVELS:
                raise CodecError("a payload of int8 has a value of -128, which is not sent")
            blocks.scale_(values[part].copy_(levels), scales[rows], self.block)
        return values

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        (size,) = sizes
        return 4 + 4 * blocks.count_blocks(size, self.block) + size


def _scales(largest: Tensor) -> Tensor:
    return torch.div(largest, _LEVELS).clamp_(max=_LARGEST_SCALE)


def _quantize(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes the nearest level of each value to ``out``; ``values`` has a row for each scale."""
    # a block with a scale of 0 has zeros, or values too small for a scale: they are sent as zeros
    torch.div(values, torch.where(scales > 0, scales, torch.inf).unsqueeze(1), out=out)
    out.round_().clamp_(-_LEVELS, _LEVELS)
