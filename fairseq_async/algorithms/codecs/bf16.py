"""bfloat16 codec: 16 bits a value."""

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs import blocks
from fairseq_async.algorithms.codecs.codec import (
    Codec,
    Vector,
    as_bytes,
    check_finite,
    check_length,
    from_bytes,
    new_vector,
)
from fairseq_async.algorithms.codecs.payload import Bytes

_LARGEST = torch.finfo(torch.bfloat16).max


class BF16(Codec):
    """Rounds to the nearest bfloat16, the upper half of a float; values above the largest one become the largest.

    Body: 2 bytes a value.
    """

    number = 1

    def _pack(self, vector: Vector) -> list[Bytes]:
        size = vector.values.numel()
        check_finite(vector.values)
        halves = new_vector((size + 1) // 2).view(torch.bfloat16)[:size]
        room = blocks.new_room(size, 1)
        for part, _ in blocks.parts(size, 1):
            within = torch.clamp(vector.values[part], -_LARGEST, _LARGEST, out=room[: part.stop - part.start])
            halves[part].copy_(within)
        return [as_bytes(halves)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        check_length(body, self._most_body_bytes(sizes))
        values = new_vector(sum(sizes)).copy_(from_bytes(body, torch.bfloat16))
        check_finite(values)
        return values

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return 2 * sum(sizes)
