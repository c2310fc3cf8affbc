"""Top-k codec: sends the largest values of each chunk, by default in two bits each."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs import bits
from fairseq_async.algorithms.codecs.codec import (
    Codec,
    Vector,
    as_bytes,
    check_finite,
    check_length,
    check_parameter,
    from_bytes,
)
from fairseq_async.algorithms.codecs.payload import Bytes
from fairseq_async.errors import CodecError

_LARGEST = torch.finfo(torch.bfloat16).max
Floats = NDArray[np.float32]


class TopK(Codec):
    """Sends the values with the ``keep`` largest |x| of each chunk of neighbouring values: SparseLoCo (Sarfi et al.
    2025, arXiv 2508.15706).

    Each value sent has a sign, and ``bits`` − 1 bits that choose one of the chunk's levels. The paper does not say
    where its levels lie. Here a single level is the mean; two levels are the means of the smaller and of the larger
    values, divided where the squared error is least; more levels are evenly spaced between the smallest and the largest
    value.

    Body: chunk, keep, bits (u32 each); for each chunk the lowest and the highest level (bf16 each); for all values that
    are sent, chunk after chunk and in ascending order, their places in the chunk, in as many bits as chunk − 1 has;
    then for each value a number of ``bits`` bits: 2 · level + (1 for a value below 0). A last chunk with fewer than
    ``keep`` values sends all of them.

    Args:
        chunk: number of neighbouring values in a chunk.
        keep: number of values of a chunk that are sent.
        bits: number of bits of each value that is sent, besides its place.
    """

    number = 4

    def __init__(self, chunk: int = 4096, keep: int = 64, bits: int = 2) -> None:
        check_parameter("chunk", chunk, 1, 1 << 16)
        check_parameter("keep", keep, 1, chunk)
        check_parameter("bits", bits, 1, 8)
        self.chunk, self.keep, self.bits = chunk, keep, bits
        self._width = max(1, (chunk - 1).bit_length())

    def _pack(self, vector: Vector) -> list[Bytes]:
        check_finite(vector.values)
        whole = vector.values.numel() // self.chunk * self.chunk
        matrix = vector.values[:whole].numpy().reshape(-1, self.chunk)
        encoded = [self._encoded(matrix, self.keep)]
        if rest := vector.values.numel() - whole:
            encoded.append(self._encoded(vector.values[whole:].numpy().reshape(1, -1), min(self.keep, rest)))
        levels, places, codes = (
            np.concatenate([part.reshape(-1) for part in parts]) for parts in zip(*encoded, strict=True)
        )
        halves = torch.from_numpy(levels).to(torch.bfloat16)
        return [self._parameters(), as_bytes(halves), bits.pack(places, self._width), bits.pack(codes, self.bits)]

    def _encoded(self, matrix: Floats, keep: int) -> tuple[Floats, bits.Numbers, bits.Numbers]:
        """Returns levels, places and codes of chunks of one length."""
        places = np.empty((len(matrix), keep), np.int64)
        for row in range(0, len(matrix), _ROWS):  # a part at a time, which stays in the cache
            places[row : row + _ROWS] = _largest(np.abs(matrix[row : row + _ROWS]), keep)
        kept = np.take_along_axis(matrix, places, axis=1)
        largest, negative = np.abs(kept), kept < 0
        ends = _rounded(self._ends(largest))
        nearest = _nearest(largest, ends, 1 << self.bits - 1)
        return ends, places.astype(np.uint16), (2 * nearest + negative).astype(np.uint16)

    def _ends(self, largest: Floats) -> Floats:
        """Returns the lowest and the highest level of each chunk."""
        if self.bits > 2:
            return np.stack([largest.min(axis=1), largest.max(axis=1)], axis=1)
        if self.bits == 1 or largest.shape[1] == 1:
            return np.repeat(_means(largest), 2, axis=1)
        return _two_means(largest)

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        (size,) = sizes
        check_length(body, self._most_body_bytes(sizes))
        if body[:12] != self._parameters():
            raise CodecError(
                f"a payload of other parameters than chunk {self.chunk}, keep {self.keep}, {self.bits} bits"
            )
        chunks, sent = self._chunks(size), self._sent(size)
        coded = 12 + 4 * chunks + bits.packed_bytes(sent, self._width)
        ends = from_bytes(body[12 : 12 + 4 * chunks], torch.bfloat16).float().numpy().reshape(-1, 2)
        if not (np.isfinite(ends).all() and (ends[:, 0] >= 0).all() and (ends[:, 1] >= ends[:, 0]).all()):
            raise CodecError("a level in a payload is NaN, Inf, below 0, or not in its order")
        places = bits.unpack(body[12 + 4 * chunks : coded], sent, self._width).astype(np.int64)
        codes = bits.unpack(body[coded:], sent, self.bits)
        values = torch.zeros(size, dtype=torch.float32, device="cpu")
        of_chunk = np.arange(sent) // self.keep
        self._check_places(places, of_chunk, size)
        scaled = _level_values(ends, 1 << self.bits - 1)[of_chunk, codes >> 1]
        values.numpy()[of_chunk * self.chunk + places] = np.where(codes & 1, -scaled, scaled)
        return values

    def _check_places(self, places: NDArray[np.int64], of_chunk: NDArray[np.int64], size: int) -> None:
        at = of_chunk * self.chunk + places
        if (places >= self.chunk).any() or (np.diff(at) <= 0).any() or (at >= size).any():
            raise CodecError("the places in a payload are outside of their chunk, or not in ascending order")

    def _parameters(self) -> bytes:
        return b"".join(value.to_bytes(4, "little") for value in (self.chunk, self.keep, self.bits))

    def _chunks(self, size: int) -> int:
        return -(-size // self.chunk)

    def _sent(self, size: int) -> int:
        """Returns how many values of a vector are sent."""
        return size // self.chunk * self.keep + min(self.keep, size % self.chunk)

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        (size,) = sizes
        sent = self._sent(size)
        packed = bits.packed_bytes(sent, self._width) + bits.packed_bytes(sent, self.bits)
        return 12 + 4 * self._chunks(size) + packed


_ROWS = 32  # chunks whose largest values are looked for at a time
_GROUPS = 4  # in which the values of a chunk are divided, for each value that is kept


def _largest(values: Floats, keep: int) -> NDArray[np.int64]:
    """Returns the places of the ``keep`` largest values of each row, in ascending order.

    A row is divided in groups. The ``keep`` largest maxima of groups are so many values: those below the least of them
    are left out of the selection, which would take four times as long among all values.
    """
    length, groups = values.shape[1], _GROUPS * keep
    if length < 2 * groups:
        return _selected(values, keep)
    maxima = values[:, : length // groups * groups].reshape(len(values), -1, groups).max(axis=1)
    least = np.partition(maxima, groups - keep, axis=1)[:, groups - keep]
    row, place = np.divmod(np.flatnonzero(values >= least[:, None]), length)
    counts = np.bincount(row)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    candidates = np.full((len(values), counts.max()), -1.0, np.float32)
    places = np.zeros(candidates.shape, np.int64)
    candidates[row, nth], places[row, nth] = values[row, place], place
    return np.take_along_axis(places, _selected(candidates, keep), axis=1)


def _selected(values: Floats, keep: int) -> NDArray[np.int64]:
    others = values.shape[1] - keep
    return np.sort(np.argpartition(values, others, axis=1)[:, others:], axis=1)


def _two_means(largest: Floats) -> Floats:
    """Returns the means of the smaller and of the larger values of each row, divided where the squared error is least.

    The error is least where n₁·m₁² + n₂·m₂² is largest, since the sum of all squares does not depend on the division.
    """
    ordered = np.sort(largest, axis=1).astype(np.float64)
    count = ordered.shape[1]
    scale = np.maximum(ordered[:, -1:], np.finfo(np.float64).tiny)  # squares of what fp32 has stay in range anyhow
    sums = np.cumsum(ordered / scale, axis=1)
    below = np.arange(1, count)
    gain = sums[:, :-1] ** 2 / below + (sums[:, -1:] - sums[:, :-1]) ** 2 / (count - below)
    at = gain.argmax(axis=1)[:, None]
    lower = np.take_along_axis(sums, at, axis=1)
    means = np.concatenate([lower / (at + 1), (sums[:, -1:] - lower) / (count - at - 1)], axis=1)
    return np.asarray(means * scale, np.float32)


def _means(largest: Floats) -> Floats:
    return np.asarray(largest.mean(axis=1, keepdims=True, dtype=np.float64), np.float32)


def _rounded(ends: Floats) -> Floats:
    """Returns the levels as they will be decoded, in bf16 precision."""
    rounded: Floats = torch.from_numpy(ends).clamp(max=_LARGEST).to(torch.bfloat16).float().numpy()
    return rounded


def _level_values(ends: Floats, levels: int) -> Floats:
    """Returns all levels of each chunk, evenly spaced."""
    share = np.linspace(0, 1, levels, dtype=np.float32) if levels > 1 else np.zeros(1, np.float32)
    return np.asarray(ends[:, :1] * (1 - share) + ends[:, 1:] * share, np.float32)


def _nearest(largest: Floats, ends: Floats, levels: int) -> NDArray[np.int64]:
    """Returns the number of the level that is nearest to each value."""
    span = (ends[:, 1:] - ends[:, :1]).astype(np.float64)
    steps = np.where(span > 0, span / max(1, levels - 1), np.inf)
    return np.clip(np.rint((largest - ends[:, :1].astype(np.float64)) / steps), 0, levels - 1).astype(np.int64)
