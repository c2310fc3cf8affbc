"""E3M0 codec: 4 bits a value, a sign and three bits of exponent."""

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
)
from fairseq_async.algorithms.codecs.memory import new_vector
from fairseq_async.algorithms.codecs.payload import Bytes
from fairseq_async.errors import CodecError

_LARGEST = torch.finfo(torch.float32).max
_LEVELS = torch.tensor([0.0, *(2.0**level for level in range(-6, 1))], dtype=torch.float32, device="cpu")
_VALUES = torch.cat([_LEVELS, -_LEVELS])  # of the 16 codes
_BORDERS = (_LEVELS[1:] + _LEVELS[:-1]) / 2  # between levels; a value on a border goes to the upper level
_LOWER = 22  # bits of a float below its sign, its exponent and one bit of its mantissa


def _code_of_upper_bits() -> Tensor:
    """Returns a table of the codes of all floats in [−1, 1], by their upper ten bits, counted from −2⁹.

    Sign, exponent and one bit of the mantissa are enough: the other bits of the borders between levels are zeros.
    """
    floats = (torch.arange(-(1 << 9), 1 << 9, dtype=torch.int32, device="cpu") << _LOWER).view(torch.float32)
    levels = torch.bucketize(floats.abs(), _BORDERS, right=True)
    return (levels + 8 * torch.signbit(floats)).to(torch.uint8)


class E3M0(Codec):
    """Rounds to the nearest level: x ≈ ± 2^(L − 7) · max|x| with L in 1 … 7, or 0 with L = 0.

    max|x| is that of a block of neighbouring values. Streaming DiLoCo sends pseudo-gradients so (Douillard et al. 2025,
    arXiv 2501.18512).

    Body: the length of a block (u32), the largest |x| of each block (fp32), half a byte for each value: bits 0 to 2
    are L, bit 3 is the sign. The first of two values is in bits 0 to 3 of their byte.

    Args:
        block: number of neighbouring values that share a scale.
    """

    number = 3

    def __init__(self, block: int = 256) -> None:
        check_parameter("block", block, 1, 1 << 20)
        self.block = block
        # both values of a byte, as one number of 8 bytes, so that decoding looks up a byte at a time
        codes = torch.arange(256, device="cpu")
        self._pairs = torch.stack([_VALUES[codes % 16], _VALUES[codes // 16]], dim=1).view(torch.int64).view(-1)
        self._codes = _code_of_upper_bits()

    def _pack(self, vector: Vector) -> list[Bytes]:
        values, size = vector.values, vector.values.numel()
        largest, room = new_vector(blocks.count_blocks(size, self.block)), blocks.new_room(size, self.block)
        codes = torch.empty(room.numel() + room.numel() % 2, dtype=torch.uint8, device="cpu")
        pairs = codes.view(torch.int16)  # a code in each byte
        of_byte = torch.empty_like(pairs)
        packed = new_vector((size + 7) // 8).view(torch.uint8)[: (size + 1) // 2]  # eight to a float
        for part, rows in blocks.parts(size, self.block):
            here = blocks.rows(values[part], self.block)
            shares = room[: here.numel()].view_as(here)
            blocks.largest_(largest[rows], here)
            torch.div(here, torch.where(largest[rows] > 0, largest[rows], 1.0).unsqueeze(1), out=shares)
            upper = shares.view(-1).view(torch.int32).bitwise_right_shift_(_LOWER).add_(1 << 9)
            torch.index_select(self._codes, 0, upper, out=codes[: here.numel()])
            torch.bitwise_right_shift(pairs, 4, out=of_byte).bitwise_or_(pairs)  # its lower byte has both codes
            packed_here = packed[part.start // 2 : (part.stop + 1) // 2]
            packed_here.copy_(of_byte[: packed_here.numel()])
        check_finite(largest)
        if size % 2:
            packed[-1] &= 15  # the upper half is of the padding of the last block
        return [self.block.to_bytes(4, "little"), as_bytes(largest), as_bytes(packed)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        (size,) = sizes
        check_length(body, self._most_body_bytes(sizes))
        scales, packed = blocks.split(body, size, self.block, _LARGEST)
        if size % 2 and packed[-1] >> 4:
            raise CodecError("half a byte behind the last value of a payload is not 0")
        values = new_vector(size + size % 2)
        pairs = values.view(torch.int64)
        for part, rows in blocks.parts(size, self.block):
            both = slice(part.start // 2, (part.stop + 1) // 2)
            codes = from_bytes(packed[both], torch.uint8).int()
            torch.index_select(self._pairs, 0, codes, out=pairs[both])
            blocks.scale_(values[part], scales[rows], self.block)
        return values[:size]

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        (size,) = sizes
        return 4 + 4 * blocks.count_blocks(size, self.block) + (size + 1) // 2
