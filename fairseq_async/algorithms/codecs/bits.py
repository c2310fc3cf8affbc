"""Packs numbers of a few bits each, one after the other: bit 0 of a number first, bit 0 of a byte first."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fairseq_async.errors import CodecError

Numbers = NDArray[np.uint16]
_AT_A_TIME = 1 << 18  # numbers; a multiple of 8, so that each part ends with a whole byte


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
    numbers = np.empty(count, np.uint16)
    for begin, end in _parts(count):
        part = np.frombuffer(data[begin * width // 8 : packed_bytes(end, width)], np.uint8)
        bits = np.unpackbits(part, bitorder="little")
        if bits[(end - begin) * width :].any():
            raise CodecError("there are bits behind the last number of a payload")
        wide = np.zeros((end - begin, 16), np.uint8)
        wide[:, :width] = bits[: (end - begin) * width].reshape(-1, width)
        numbers[begin:end] = np.packbits(wide, axis=1, bitorder="little").reshape(-1).view("<u2")
    return numbers


def _packed(numbers: Numbers, width: int) -> bytes:
    octets = numbers.astype("<u2").view(np.uint8).reshape(-1, 2)
    bits = np.unpackbits(octets, axis=1, count=width, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _parts(count: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _AT_A_TIME, count)) for begin in range(0, count, _AT_A_TIME))
