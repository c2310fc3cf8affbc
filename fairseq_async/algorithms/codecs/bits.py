"""Packs numbers of a few bits each, one after the other: bit 0 of a number first, bit 0 of a byte first.

Eight numbers of w bits are w whole bytes. So the numbers at the same place of all such groups have their bits in the
same bytes of their group, and are moved together.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairseq_async.errors import CodecError

Numbers = NDArray[np.uint16]
_GROUP = 8
_AT_A_TIME = 1 << 18  # numbers, in whole groups; they stay in the cache


def packed_bytes(count: int, width: int) -> int:
    """Returns the number of bytes of ``count`` numbers of ``width`` bits."""
    return (count * width + 7) // 8


def pack(numbers: Numbers, width: int) -> bytes:
    """Packs numbers below 2^width into bytes; the last byte is filled up with zeros. Widths are 1 to 16."""
    return b"".join(_packed(numbers[begin:end], width) for begin, end in _parts(numbers.size))


def unpack(data: memoryview, count: int, width: int) -> Numbers:
    """Returns the ``count`` numbers that :func:`pack` has packed into ``data``, which must be exactly their bytes.

    Raises:
        CodecError: a bit after the last number is set.
    """
    used = count * width % 8
    if used and data[-1] >> used:
        raise CodecError("there are bits behind the last number of a payload")
    numbers = np.empty(count, np.uint16)
    for begin, end in _parts(count):
        part = np.frombuffer(data[begin * width // 8 : packed_bytes(end, width)], np.uint8)
        numbers[begin:end] = _unpacked(part, end - begin, width)
    return numbers


def _packed(numbers: Numbers, width: int) -> bytes:
    groups = _groups(numbers, _GROUP, np.dtype(np.uint32))
    octets = np.zeros((len(groups), width), np.uint8)
    for place in range(_GROUP):
        first, shift, own = _bytes_of(place, width)
        shifted = groups[:, place] << shift
        for byte in range(own):
            octets[:, first + byte] |= (shifted >> 8 * byte).astype(np.uint8)
    return octets.reshape(-1)[: packed_bytes(numbers.size, width)].tobytes()


def _unpacked(octets: NDArray[np.uint8], count: int, width: int) -> Numbers:
    groups = _groups(octets, width, np.dtype(np.uint8))
    numbers = np.empty((len(groups), _GROUP), np.uint16)
    for place in range(_GROUP):
        first, shift, own = _bytes_of(place, width)
        joined = groups[:, first].astype(np.uint32)
        for byte in range(1, own):
            joined |= groups[:, first + byte].astype(np.uint32) << 8 * byte
        numbers[:, place] = joined >> shift & (1 << width) - 1
    return numbers.reshape(-1)[:count]


def _bytes_of(place: int, width: int) -> tuple[int, int, int]:
    """Returns where the number at a place of its group begins, a byte and a bit in it, and how many bytes it is in."""
    first, shift = divmod(place * width, 8)
    return first, shift, packed_bytes(1, shift + width)


def _groups(values: NDArray[Any], length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns a copy of the values in rows of this length; the last row is filled up with zeros."""
    rows = np.zeros((-(-values.size // length), length), dtype)
    rows.reshape(-1)[: values.size] = values
    return rows


def _parts(count: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _AT_A_TIME, count)) for begin in range(0, count, _AT_A_TIME))
