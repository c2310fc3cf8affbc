"""AdaComp with a scale for each bin, in place of one for the tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs import bits, blocks
from fairseq_async.algorithms.codecs.adacomp import AdaComp
from fairseq_async.algorithms.codecs.codec import check_parameter
from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes
from fairseq_async.errors import CodecError

_SHIFT = 20  # a float without these lowest bits has its exponent and three bits of its mantissa
_MOST = 0x7F7  # the largest finite one
_NONE = 255  # in place of a level: the bin sends nothing
_USUAL_SHARE = 8  # one in so many values of a bin is usually sent, as of gradients in bins of 25 and 32


class AdaCompBins(AdaComp):
    """AdaComp with a scale for each bin: a value that is sent is sign(G_j) times max|G| of its bin.

    AdaComp's one scale for a tensor, the mean of the bins' max|G|, is far above the values of some bins and far below
    those of others, in an embedding above all, most rows of which have no gradient. A scale for each bin is not in the
    paper. It is rounded to four bits of precision; what that loses stays in the residual. A bin whose scale is less
    than about 2^-31 of the tensor's largest one sends nothing.

    Body: T (u32); for each tensor: how many values it sends (u32); the upper 12 bits of its largest scale, as fp32
    (u16); for each bin the number of steps from there down to its scale (u8), 255 for a bin that sends nothing; then a
    number for each value that is sent, bin after bin and in ascending order: 4 · place + 2 if it is the last of its bin
    + 1 if it is below 0, in 2 + max(1, bit length of (T − 1)) bits.

    Args:
        bin_size: T, the values in a bin.
    """

    number = 8

    def __init__(self, bin_size: int = 500) -> None:
        check_parameter("bin_size", bin_size, 1, 1 << 14)
        super().__init__(bin_size)
        self._usual = max(1, bin_size // _USUAL_SHARE)
        self._width = 2 + max(1, (bin_size - 1).bit_length())
        self.assumption = f"each bin sends {self._usual} of its {bin_size} values"

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        bins = [blocks.count_blocks(size, self.bin_size) for size in sizes]
        sent = [min(each * self._usual, size) for each, size in zip(bins, sizes, strict=True)]
        return header_bytes(len(sizes)) + self._body_bytes(bins, sent)

    def _packed(self, values: Tensor, newest: Tensor) -> list[Bytes]:
        largest = blocks.largest(values, self.bin_size)
        codes = np.minimum((largest.numpy().view(np.int32) + (1 << _SHIFT - 1)) >> _SHIFT, _MOST)
        top = int(codes.max(initial=0))
        levels = top - codes
        largest[torch.from_numpy((codes == 0) | (levels >= _NONE))] = 0.0  # these bins send nothing
        places = self._sent(values, newest, largest)
        of_bin = places // self.bin_size
        levels[np.bincount(of_bin, minlength=levels.size) == 0] = _NONE
        last = np.diff(of_bin, append=-1) != 0
        numbers = (places - of_bin * self.bin_size << 2) + (last << 1) + (values.numpy()[places] < 0)
        return [
            len(numbers).to_bytes(4, "little"),
            top.to_bytes(2, "little"),
            levels.astype(np.uint8).tobytes(),
            bits.pack(numbers.astype(np.uint16), self._width),
        ]

    def _decode(self, body: memoryview, values: NDArray[np.float32]) -> memoryview:
        start = 6 + blocks.count_blocks(values.size, self.bin_size)
        sent, top = int.from_bytes(body[:4], "little"), int.from_bytes(body[4:6], "little")
        end = start + bits.packed_bytes(sent, self._width)
        if body.nbytes < end or sent > values.size:
            raise CodecError("a payload ends in the middle of a tensor")
        levels = np.frombuffer(body[6:start], np.uint8).astype(np.int32)
        bins = np.flatnonzero(levels != _NONE)
        codes = top - levels[bins]
        if top > _MOST or (codes <= 0).any():
            raise CodecError("a scale of a payload is 0, NaN or Inf")
        numbers = bits.unpack(body[start:end], sent, self._width)
        last, at = np.flatnonzero(numbers & 2), numbers >> 2
        if last.size != bins.size or (sent and (not last.size or last[-1] != sent - 1)):
            raise CodecError("the values in a payload are of more or fewer bins than have a scale")
        counts = np.diff(last, prepend=-1)
        places = np.repeat(bins * self.bin_size, counts) + at
        if (at >= self.bin_size).any() or (np.diff(places) <= 0).any() or (places >= values.size).any():
            raise CodecError("the places in a payload are outside of their bin, or not in ascending order")
        scales = np.repeat((codes << _SHIFT).view(np.float32), counts)
        values[places] = np.where(numbers & 1, -scales, scales)
        return body[end:]

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return self._body_bytes([blocks.count_blocks(size, self.bin_size) for size in sizes], sizes)

    def _body_bytes(self, bins: Sequence[int], sent: Sequence[int]) -> int:
        own = (6 + count + bits.packed_bytes(n, self._width) for count, n in zip(bins, sent, strict=True))
        return 4 + sum(own)
