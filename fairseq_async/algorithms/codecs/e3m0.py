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
    new_vector,
)
from fairseq_async.algorithms.codecs.payload import Bytes
from fairseq_async.errors import CodecError

_LARGEST = torch.finfo(torch.float32).max
_LEVELS = torch.tensor([0.0, *(2.0**level for level in range(-6, 1))], dtype=torch.float32, device="cpu")
_VALUES = torch.cat([_LEVELS, -_LEVELS])  # of the 16 codes
_STEPS = 128  # in a block's largest value; the borders between levels are whole numbers of steps: 1, 3, 6, 12, …, 96
_BORDERS = _STEPS * (_LEVELS[1:] + _LEVELS[:-1]) / 2  # a value on a border goes to the upper level
_MOST = 127  # steps of one byte; all from 96 on are of the highest level


def _code_of_pairs() -> Tensor:
    """Returns a table of the byte of each pair of values. Its index has 16 bits, the steps of a value in each byte.

    A look-up costs more than all arithmetic of a value, so that one is made for two values.
    """
    steps = torch.arange(1 << 8, device="cpu").to(torch.int8).float()
    codes = torch.bucketize(steps.abs(), _BORDERS, right=True) + 8 * (steps < 0)
    return (codes + 16 * codes.unsqueeze(1)).to(torch.uint8).view(-1)


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
        self._codes = _code_of_pairs()

    def _pack(self, vector: Vector) -> list[Bytes]:
        values, size = vector.values, vector.values.numel()
        largest, room = new_vector(blocks.count_blocks(size, self.block)), blocks.new_room(size, self.block)
        steps = torch.empty(room.numel() + room.numel() % 2, dtype=torch.int8, device="cpu")
        pairs = steps.view(torch.uint16)
        index = torch.empty_like(pairs, dtype=torch.int32)
        packed = new_vector((size + 7) // 8).view(torch.uint8)[: (size + 1) // 2]  # eight to a float
        for part, rows in blocks.parts(size, self.block):
            here = blocks.rows(values[part], self.block)
            shares = room[: here.numel()].view_as(here)
            blocks.largest_(largest[rows], here)
            torch.div(here, torch.where(largest[rows] > 0, largest[rows], 1.0).unsqueeze(1), out=shares)
            steps[: here.numel()].copy_(shares.mul_(_STEPS).clamp_(-_MOST, _MOST).view(-1))  # rounds towards 0
            packed_here = packed[part.start // 2 : (part.stop + 1) // 2]
            index_here = index[: packed_here.numel()].copy_(pairs[: packed_here.numel()])
            torch.index_select(self._codes, 0, index_here, out=packed_here)
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
