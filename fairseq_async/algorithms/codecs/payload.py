"""The bytes of an encoded vector: a header, the sizes of its tensors, and the codec's own body (docs/wire.md)."""

import struct
import zlib
from collections.abc import Sequence

from fairseq_async.errors import CodecError

MAGIC, VERSION = b"FSAC", 1
_HEADER = struct.Struct("<4sBBHIQ")  # magic, version, codec, 0, tensors, bytes of the body
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all the rest
_START = _HEADER.size + _CHECKSUM.size
Bytes = bytes | bytearray | memoryview


def header_bytes(tensors: int) -> int:
    """Returns the number of bytes before the body, for so many tensors."""
    return _START + 8 * tensors


def seal(codec: int, sizes: Sequence[int], body: Sequence[Bytes]) -> bytes:
    """Returns the payload of a codec's body, which may be in several parts.

    Args:
        codec: number of the codec.
        sizes: number of values of each tensor.
    """
    header = _HEADER.pack(MAGIC, VERSION, codec, 0, len(sizes), sum(memoryview(part).nbytes for part in body))
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    checksum = 0
    for part in (header, table, *body):
        checksum = zlib.crc32(part, checksum)
    return b"".join((header, _CHECKSUM.pack(checksum), table, *body))


def unseal(
    data: Bytes, codec: int, size: int, sizes: tuple[int, ...] | None = None
) -> tuple[memoryview, tuple[int, ...]]:
    """Checks a payload, and returns its body and the sizes of its tensors.

    Args:
        codec: number of the codec.
        size: number of values that the payload must have in all.
        sizes: number of values that each tensor must have; None where it is not known.

    Raises:
        CodecError: it is no payload of this codec, has another number of values, or is damaged.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < _START:
        raise CodecError(f"a payload of {view.nbytes} bytes: the header alone has {_START}")
    magic, version, number, reserved, tensors, length = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION or reserved:
        raise CodecError(f"these bytes are no payload of version {VERSION}")
    if number != codec:
        raise CodecError(f"a payload of codec {number}: codec {codec} was expected")
    if view.nbytes != header_bytes(tensors) + length:  # checked before these numbers are used
        raise CodecError(f"a payload of {view.nbytes} bytes announces {tensors} tensors and a body of {length} bytes")
    if sizes is not None and tensors != len(sizes):
        raise CodecError(f"a payload of {tensors} tensors: {len(sizes)} were expected")
    found = struct.unpack_from(f"<{tensors}Q", view, _START)
    if sum(found) != size:
        raise CodecError(f"a payload of {sum(found)} values: {size} were expected")
    if sizes is not None and found != sizes:
        raise CodecError("a payload of tensors of other sizes than those of this model")
    if zlib.crc32(view[_START:], zlib.crc32(view[: _HEADER.size])) != _checksum(view):
        raise CodecError("a payload with a wrong checksum: it was changed on its way")
    return view[header_bytes(tensors) :], found


def checksum_of(data: Bytes) -> str:
    """Returns the checksum in a payload's header, in hexadecimal, by which logs identify the payload."""
    return f"{_checksum(data):08x}"


def _checksum(data: Bytes) -> int:
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    return int(checksum)
