"""A short name for a vector's exact bits."""

import zlib

from torch import Tensor


def checksum(flat: Tensor) -> str:
    """CRC-32 of the bytes of a flat contiguous tensor: equal for equal bits. About 0.4 s for a gigabyte."""
    return f"{zlib.crc32(flat.detach().cpu().numpy().data):08x}"
