"""Operations on vectors in blocks of equal length, each with its own scale; part by part, to stay in the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fairseq_async.algorithms.codecs.codec import check_finite, from_bytes, new_vector
from fairseq_async.errors import CodecError

_VALUES = 1 << 19  # at a time: 2 MiB, which stay in the cache; less would cost more calls of torch


def count_blocks(size: int, block: int) -> int:
    """Returns the number of blocks of a vector; the last block may be shorter."""
    return -(-size // block)


def parts(size: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields runs of whole blocks: the slice of values, and the slice of blocks. The last block may be shorter."""
    blocks = max(2, _VALUES // block // 2 * 2)  # even, for codecs in which two values share a byte
    for first in range(0, count_blocks(size, block), blocks):
        last = min(first + blocks, count_blocks(size, block))
        yield slice(first * block, min(last * block, size)), slice(first, last)


def rows(values: Tensor, block: int) -> Tensor:
    """Returns the values as a matrix with a row for each block; a last row that is too short is filled with zeros."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)


def new_room(size: int, block: int) -> Tensor:
    """Allocates memory for one of the :func:`parts` of a vector, which each uses in turn: it stays in the cache."""
    first = next(parts(size, block), (slice(0), slice(0)))
    return new_vector(first[1].stop * block)


def largest(values: Tensor, block: int) -> Tensor:
    """Returns the largest absolute value of each block.

    Raises:
        CodecError: a value is NaN or Inf.
    """
    size = values.numel()
    found = new_vector(count_blocks(size, block))
    for part, blocks in parts(size, block):
        largest_(found[blocks], rows(values[part], block))
    check_finite(found)
    return found


def largest_(found: Tensor, values: Tensor) -> None:
    """Writes the largest absolute value of each row of ``values`` to ``found``, NaN where a value is NaN."""
    torch.amax(values, dim=1, out=found)  # twice over the values in the cache costs less than writing |x| once
    torch.maximum(found, torch.amin(values, dim=1).neg_(), out=found).abs_()


def scale_(values: Tensor, scales: Tensor, block: int) -> None:
    """Multiplies each block in place by its scale; the last block may be shorter."""
    whole = values.numel() // block
    values[: whole * block].view(-1, block).mul_(scales[:whole].unsqueeze(1))
    values[whole * block :].mul_(scales[whole:])


def split(body: memoryview, size: int, block: int, most: float) -> tuple[Tensor, memoryview]:
    """Returns the scales, and the bytes after them, of a body that begins with the length of a block.

    Raises:
        CodecError: the blocks have another length, or a scale is one that no encoder writes: NaN, below 0, above
            ``most``.
    """
    given = int.from_bytes(body[:4], "little")
    if given != block:
        raise CodecError(f"a payload in blocks of {given} values: {block} were expected")
    end = 4 + 4 * count_blocks(size, block)
    scales = from_bytes(body[4:end], torch.float32)
    if not ((scales >= 0) & (scales <= most)).all():
        raise CodecError("a scale in a payload is NaN, below 0 or too large")
    return scales, body[end:]
