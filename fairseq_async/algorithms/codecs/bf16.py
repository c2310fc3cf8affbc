"""bfloat16 codec: 16 bits a value."""

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs import blocks
from fairseq_async.algorithms.codecs.codec import Codec, Vector, as_bytes, check_finite, check_length, from_bytes
from fairseq_async.algorithms.codecs.payload import Bytes

_LARGEST = torch.finfo(torch.bfloat16).max


class BF16(Codec):
    """Rounds to the nearest bfloat16, the upper half of a float; values above the largest one become the largest.

    Body: 2 bytes a value.
    """

    number = 1

    def _pack(self, vector: Vector) -> list[Bytes]:
        check_finite(vector.values)
        halves = torch.empty(vector.values.numel(), dtype=torch.bfloat16, device="cpu")
        for part, _ in blocks.parts(halves.numel(), 1):
            halves[part] = vector.values[part].clamp(-_LARGEST, _LARGEST)
        return [as_bytes(halves)]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        check_length(body, self._most_body_bytes(sizes))
        values = from_bytes(body, torch.bfloat16).float()
        check_finite(values)
        return values

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return 2 * sum(sizes)
