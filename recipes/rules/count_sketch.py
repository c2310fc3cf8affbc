"""Count sketches: sums of a vector's values, from which the largest values can be estimated."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairseq_async.algorithms.codecs.codec import Codec, Vector, check_finite, check_length, check_parameter
from fairseq_async.algorithms.codecs.payload import Bytes, seal
from fairseq_async.errors import CodecError

Unsigned = NDArray[np.uint64]
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_HASHED = 1 << 18  # places at a time
_MASK = (1 << 64) - 1


class CountSketch(Codec):
    """Encodes a vector as a table of ``rows`` · ``columns`` sums (Charikar, Chen and Farach-Colton 2002, "Finding
    Frequent Items in Data Streams"). The sum of two sketches is the sketch of the sum of their vectors.

    In each row r, value i is added to one column, h_r(i), with a sign, s_r(i). The median over the rows of
    s_r(i) · table[r, h_r(i)] estimates value i. With 64-bit numbers a_r, b_r, a'_r, b'_r from the seed:
    h_r(i) = ((a_r·i + b_r mod 2⁶⁴) >> 32) · columns >> 32, and s_r(i) is −1 where bit 63 of a'_r·i + b'_r mod 2⁶⁴ is 1.

    Body: rows (u32), columns (u32), seed (u64), the table, row after row (fp32).

    Args:
        rows: number of rows of the table; with an odd number, the median is one of the rows' estimates.
        columns: number of columns of the table.
        seed: seed of the hashes; only sketches with the same seed can be added.
    """

    number = 7

    def __init__(self, rows: int = 5, columns: int = 1 << 14, seed: int = 0) -> None:
        check_parameter("rows", rows, 1, 64)
        check_parameter("columns", columns, 1, 1 << 31)
        check_parameter("seed", seed, 0, _MASK)
        self.rows, self.columns, self.seed = rows, columns, seed
        self._factors = _numbers(seed, 4 * rows).reshape(rows, 4)

    def add(self, first: Bytes, second: Bytes) -> bytes:
        """Returns the sketch of the sum of two vectors, given their sketches.

        Raises:
            CodecError: one is no sketch with these rows, columns and seed, or the vectors are of two sizes.
        """
        size = _size_of(first)
        with np.errstate(over="ignore"):  # a sum that is too large becomes Inf, which is refused
            sum_ = self._table(first, size) + self._table(second, size)
        check_finite(torch.from_numpy(sum_))
        return seal(self.number, (size,), [self._parameters(), sum_.astype("<f4").tobytes()])

    def estimate(self, data: Bytes, indices: Tensor) -> Tensor:
        """Returns estimates of the values at these places of the sketched vector: flat, fp32, on the CPU.

        Args:
            indices: whole numbers, on any device.

        Raises:
            CodecError: ``data`` is no such sketch, or a place is outside of the vector.
        """
        size = _size_of(data)
        places = indices.reshape(-1).cpu().numpy()
        if places.size and not 0 <= places.min() <= places.max() < size:
            raise CodecError(f"a place is outside of the vector, which has {size} values")
        return torch.from_numpy(self._estimates(self._table(data, size), places.astype(np.uint64)))

    def _pack(self, vector: Vector) -> list[Bytes]:
        values = vector.values.numpy()
        table = np.zeros((self.rows, self.columns))
        for begin in range(0, values.size, _HASHED):
            part = values[begin : begin + _HASHED].astype(np.float64)
            places = np.arange(begin, begin + part.size, dtype=np.uint64)
            for row in range(self.rows):
                columns, signs = self._hashed(row, places)
                table[row] += np.bincount(columns, signs * part, minlength=self.columns)
        with np.errstate(over="ignore"):
            sums = table.astype("<f4")
        check_finite(torch.from_numpy(sums))
        return [self._parameters(), sums.tobytes()]

    def _unpack(self, body: memoryview, sizes: tuple[int, ...]) -> Tensor:
        (size,) = sizes
        table = self._parsed(body)
        values = np.empty(size, np.float32)
        for begin in range(0, size, _HASHED):
            places = np.arange(begin, min(begin + _HASHED, size), dtype=np.uint64)
            values[begin : begin + places.size] = self._estimates(table, places)
        return torch.from_numpy(values)

    def _hashed(self, row: int, places: Unsigned) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns column and sign of each place in a row of the table."""
        a, b, a_of_sign, b_of_sign = self._factors[row]
        shift = np.uint64(32)
        columns = ((a * places + b) >> shift) * np.uint64(self.columns) >> shift
        negative = (a_of_sign * places + b_of_sign) >> np.uint64(63)
        return columns.astype(np.int64), 1.0 - 2.0 * negative.astype(np.float64)

    def _estimates(self, table: NDArray[np.float32], places: Unsigned) -> NDArray[np.float32]:
        found = np.empty((self.rows, places.size))
        for row in range(self.rows):
            columns, signs = self._hashed(row, places)
            found[row] = signs * table[row, columns]
        return np.asarray(np.median(found, axis=0), np.float32)

    def _table(self, data: Bytes, size: int) -> NDArray[np.float32]:
        return self._parsed(self._opened(data, size)[0])

    def _parsed(self, body: memoryview) -> NDArray[np.float32]:
        check_length(body, self._most_body_bytes(()))
        if body[:16] != self._parameters():
            raise CodecError(f"a sketch of other parameters than rows {self.rows}, columns {self.columns} and the seed")
        table = np.frombuffer(body[16:], "<f4").reshape(self.rows, self.columns)
        if not np.isfinite(table).all():
            raise CodecError("a sum in a sketch is NaN or Inf")
        return table

    def _parameters(self) -> bytes:
        lengths = self.rows.to_bytes(4, "little") + self.columns.to_bytes(4, "little")
        return lengths + self.seed.to_bytes(8, "little")

    def _most_body_bytes(self, sizes: tuple[int, ...]) -> int:
        return 16 + 4 * self.rows * self.columns


def _numbers(seed: int, count: int) -> Unsigned:
    """Returns the first ``count`` numbers of the generator SplitMix64 with this seed."""
    numbers = []
    for step in range(1, count + 1):
        mixed = (seed + step * _GOLDEN) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
        numbers.append(mixed ^ (mixed >> 31))
    return np.array(numbers, np.uint64)


def _size_of(data: Bytes) -> int:
    """Returns the number of values in a sketch's header, unchecked: it is checked when the rest is read."""
    view = memoryview(data)
    return int.from_bytes(view[24:32], "little") if view.nbytes >= 32 else 0
