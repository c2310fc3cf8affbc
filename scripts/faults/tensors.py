"""The tensors of a hostile worker's updates: valid ones, and ones that no codec writes."""

import random
import struct
import zlib

import torch

from fairseq_async.method.spec import MethodSpec
from fairseq_async.options import compression
from fairseq_async.protocol import Layout

_HEADER, _CHECKSUM = 20, slice(20, 24)  # bytes of a payload: docs/wire.md


class HostileTensors:
    """Makes zeros, which change nothing, and tensors that a server must refuse: NaN, or payloads spoilt in some way.

    Args:
        rng: draws the way in which a payload is spoilt.
    """

    def __init__(self, spec: MethodSpec, layout: Layout, rng: random.Random) -> None:
        push, sizes = spec.compress.push, [segment.size for segment in layout.segments]
        self._compressed, self._rng = push is not None, rng
        self.zeros = bytes(4 * layout.size)
        if push is not None:
            self.zeros = compression.build(push).encode(torch.zeros(layout.size), sizes=sizes)
        self._tensors = int.from_bytes(self.zeros[8:12], "little")
        self._nan = struct.pack("<f", float("nan")) * layout.size

    def bad(self) -> bytes:
        """Returns a tensor or payload that the server must refuse."""
        if not self._compressed:
            return self._nan
        payload, rng = bytearray(self.zeros), self._rng
        match rng.randrange(5):
            case 0:
                del payload[rng.randrange(1, len(payload)) :]
            case 1:
                payload += rng.randbytes(rng.randint(1, 64))
            case 2:
                payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
            case 3:  # a false header with the right checksum
                payload[rng.randrange(_HEADER)] ^= 1 << rng.randrange(8)
                _seal(payload)
            case _:  # a body of ones with the right checksum: another block length, or NaN
                start = _CHECKSUM.stop + 8 * self._tensors
                payload[start:] = b"\xff" * (len(payload) - start)
                _seal(payload)
        return bytes(payload)


def _seal(payload: bytearray) -> None:
    """Sets the checksum of a payload that was changed."""
    found = zlib.crc32(payload[_CHECKSUM.stop :], zlib.crc32(payload[:_HEADER]))
    payload[_CHECKSUM] = found.to_bytes(4, "little")
