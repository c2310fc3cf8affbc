"""A check that the ranks of a group hold the same parameters."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.errors import ConfigurationError

_AT_ONCE = 1 << 20  # elements, so that the int64 copies stay small
_FACTOR = 0x13C6EF372FE94E  # even: every weight is odd, so that a change of one word is never lost


def check_equal(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks hold the same parameters, to the bit. Every rank must call it.

    The ranks exchange a checksum of 8 bytes for each tensor: of its bits, so that two ranks with the same NaN agree.

    Raises:
        ConfigurationError: on all ranks, if a name, a shape, a type or a value differs. It names the first tensor.
    """
    device = named[0][1].device
    layout = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    # First the layout: with another number of parameters the second reduction would be of another size on some ranks.
    if not _equal_on_all_ranks(torch.tensor([zlib.crc32("\n".join(layout).encode())], device=device), group)[0]:
        raise ConfigurationError(
            "the ranks have different models (names, shapes or types of their parameters): start the same command "
            "with the same data on all of them"
        )
    same = _equal_on_all_ranks(torch.stack([checksum(tensor) for _, tensor in named]), group)
    if not bool(same.all()):
        first = int((~same).nonzero()[0])
        raise ConfigurationError(
            f"the ranks have different values in {int((~same).sum())} of {len(named)} parameters, the first of them "
            f"{named[first][0]}: begin with the same seed or the same checkpoint on all of them"
        )


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of a tensor's bits, each word weighted by its place: int64, without dimensions.

    The sum may overflow; integers wrap around, the same on every rank.
    """
    values = tensor.detach().reshape(-1)
    words = values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _AT_ONCE):
        part = words[start : start + _AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device)
        total += (part * (places * _FACTOR + 1)).sum()
    return total


def _equal_on_all_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Tells for each number whether all ranks have the same."""
    least, most = numbers.clone(), numbers.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return least == most
