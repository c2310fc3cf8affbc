"""AdaComp: sends those values of each bin that are about as large as the bin's largest value."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs import bits, blocks
from fairseq_async.algorithms.codecs.codec import Codec, Vector, check_finite, check_parameter
from fairseq_async.algorithms.codecs.payload import Bytes, header_bytes
from fairseq_async.errors import CodecError

_LARGEST = torch.finfo(torch.float32).max
_USUAL_SHARE = 25  # one in so many values of a bin is usually sent
_SMALL = 255  # bins up to this length have places and counts of one byte


class AdaComp(Codec):
    """AdaComp (Chen et al. 2018, arXiv 1712.02679), for gradients: the number of values sent adapts itself, without a
    sort.

    Let g be the newest gradient, G = residual + g and H = G + g. Of each bin of T neighbouring values of a tensor,
    those with |H_j| ≥ max|G| of the bin are sent, each as sign(G_j) times the mean of the bins' max|G|, one number for
    the tensor. A value with G_j = 0 is not sent, so a bin of zeros sends nothing.

    Body: T (u32); for each tensor its scale (fp32), how many values each bin sends, the places of these values in their
    bins, bin after bin and in ascending order, and a bit for each, 1 for a value below 0, filled up to a whole byte.
    Counts and places are one byte each up to T = 255, two bytes above.

    Args:
        bin_size: T, the values in a bin: 500 for fully connected and recurrent layers, 50 for convolutions.
    """

    number = 5
    by_tensor = True

    def __init__(self, bin_size: int = 500) -> None:
        check_parameter("bin_size", bin_size, 1, (1 << 16) - 1)
        self.bin_size = bin_size
        self._usual = max(1, bin_size // _USUAL_SHARE)
        self.assumption = f"each bin sends {self._usual} of its {bin_size} values"
        self._index = np.dtype("u1" if bin_size <= _SMALL else "<u2")

    def usual_bytes(self, sizes: Sequence[int]) -> int:
        width = self._index.itemsize
        bins = [blocks.count_blocks(size, self.bin_size) for size in sizes]
        sent = [min(each * self._usual, size) for each, size in zip(bins, sizes, strict=True)]
        own = (4 + width * (n + count) + bits.packed_bytes(count, 1) for n, count in zip(bins, sent, strict=True))
        return header_bytes(len(sizes)) + 4 + sum(own)

    def _pack(self, vector: Vector) -> list[Bytes]:
        check_finite(vector.newest)
        body: list[Bytes] = [self.bin_size.to_bytes(4, "little")]
        for values, newest in vector.tensors():
            body += self._packed(values, newest)
        return body

    def _packed(self, values: Tensor, newest: Tensor) -> list[Bytes]:
        """Returns one tensor's part of the body."""
        largest = blocks.largest(values, self.bin_size)
        # numpy adds in one order, whatever the number of threads
        scale = largest.numpy().mean(dtype=np.float64) if largest.numel() else np.float64(0)
        places = self._sent(values, newest, largest)
        of_bin, at = np.divmod(places, self.bin_size)
        counts = np.bincount(of_bin, minlength=largest.numel())
        negative = (values.numpy()[places] < 0).astype(np.uint16)
        return [
            scale.astype("<f4").tobytes(),
            counts.astype(self._index).tobytes(),
            at.astype(self._index).tobytes(),
            bits.pack(negative, 1),
        ]

    def _sent(self, values: Tensor, newest: Tensor, largest: Tensor) -> NDArray[np.int64]:
        """Returns the places in the tensor of the values to send, ascending."""
        limits = torch.where(largest > 0, largest, torch.inf).unsqueeze(1)
        room = blocks.new_room(values.numel(), self.bin_size)
        large = torch.empty_like(room, dtype=torch.bool)
        found = [np.empty(0, np.int64)]
        for part, bins in blocks.parts(values.numel(), self.bin_size):
            sums = torch.add(values[part], newest[part], out=room[: part.stop - part.start]).abs_()
            rows = blocks.rows(sums, self.bin_size)
            torch.ge(rows, limits[bins], out=large[: rows.numel()].view_as(rows))
            found.append(np.flatnonzero(large[: sums.numel()].numpy()) + part.start)
        places: NDArray[np.int64] = np.concatenate(found)
        return np.extract(values.numpy()[places] != 0, places)  # asked of the few that are large, not of all

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        if int.from_bytes(body[:4], "little") != self.bin_size:
            raise CodecError(f"a payload of other bins than those of {self.bin_size} values")
        values = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu")
        rest = body[4:]
        for view in values.split(sizes):
            rest = self._decode(rest, view.numpy())
        if rest.nbytes:
            raise CodecError(f"there are {rest.nbytes} bytes behind the last tensor of a payload")
        return values

    def _decode(self, body: memoryview, values: NDArray[np.float32]) -> memoryview:
        """Writes the values of one tensor; returns the bytes after it."""
        bins, width = blocks.count_blocks(values.size, self.bin_size), self._index.itemsize
        start = 4 + width * bins
        if body.nbytes < start:
            raise CodecError("a payload ends in the middle of a tensor")
        (scale,) = np.frombuffer(body[:4], "<f4")
        counts = np.frombuffer(body[4:start], self._index).astype(np.int64)
        sent = int(counts.sum())
        end = start + width * sent + bits.packed_bytes(sent, 1)
        if not 0 <= scale <= _LARGEST or body.nbytes < end:
            raise CodecError("a scale of a payload is NaN, below 0 or Inf, or a bin sends more than it has")
        at = np.frombuffer(body[start : start + width * sent], self._index).astype(np.int64)
        places = np.repeat(np.arange(bins), counts) * self.bin_size + at
        if (at >= self.bin_size).any() or (np.diff(places) <= 0).any() or (places >= values.size).any():
            raise CodecError("the places in a payload are outside of their bin, or not in ascending order")
        negative = bits.unpack(body[start + width * sent : end], sent, 1)
        values[places] = np.where(negative, -scale, scale)
        return body[end:]

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        width = self._index.itemsize
        of_tensors = (
            4 + width * (blocks.count_blocks(size, self.bin_size) + size) + bits.packed_bytes(size, 1) for size in sizes
        )
        return 4 + sum(of_tensors)
