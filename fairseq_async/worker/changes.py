"""Notices parameters that were changed by something else than the run."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WIDTH = 127  # words of 8 bytes in a row: rows are summed at the memory's speed, and only their sums are weighted
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterWatch:
    """Compares parameters with those of an earlier time, by a fingerprint of 8 bytes for each.

    The fingerprint is of the bits, so that it does not matter how a parameter was changed: in place, through ``data``,
    or by another tensor as its ``data``. It takes one pass over the memory; on a GPU one kernel for each tensor, and
    the process waits for the device once, when it compares.

    Args:
        named: the parameters with their names.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._noted: dict[torch.device, Tensor] | None = None

    def note(self) -> None:
        """Notes the parameters as they are now."""
        self._noted = self._fingerprints()

    def changed(self) -> str | None:
        """Returns the name of the first parameter that is not as it was noted; None if there is none."""
        if self._noted is None:
            return None
        now = self._fingerprints()
        if now.keys() == self._noted.keys() and all(torch.equal(now[device], self._noted[device]) for device in now):
            return None
        present, noted = _by_parameter(now, self._named), _by_parameter(self._noted, self._named)
        different = (name for (name, _), one, other in zip(self._named, present, noted, strict=True) if one != other)
        return next(different, self._named[0][0])

    def _fingerprints(self) -> dict[torch.device, Tensor]:
        devices = dict.fromkeys(tensor.device for _, tensor in self._named)
        return {device: _fingerprints(each for _, each in self._named if each.device == device) for device in devices}


def _by_parameter(fingerprints: dict[torch.device, Tensor], named: Sequence[tuple[str, Tensor]]) -> list[int | None]:
    """Returns the fingerprint of each parameter; None where it has come from another device since."""
    each = {device: iter(values.tolist()) for device, values in fingerprints.items()}
    return [next(each[tensor.device], None) if tensor.device in each else None for _, tensor in named]


@torch.no_grad()
def _fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a number for each of these tensors of one device: Σ wᵢ · rowᵢ mod 2⁶⁴, with odd wᵢ that depend on the
    place, so that values that have changed places show too."""
    rows = [_rows(tensor) for tensor in tensors]
    sums = torch.cat([part for parts in rows for part in parts])
    totals = sums.mul_(torch.arange(1, 2 * len(sums), 2, device=sums.device)).cumsum(0)
    ends = torch.tensor([sum(map(len, parts)) for parts in rows], device="cpu").cumsum(0)
    before_each = torch.cat((totals.new_zeros(1), totals))[torch.cat((ends.new_zeros(1), ends)).to(totals.device)]
    return before_each.diff()


def _rows(tensor: Tensor) -> list[Tensor]:
    """Returns the sums of rows of the tensor's bits, as integers of 8 bytes, and what is left behind the last row."""
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    bits = flat.view(_INTEGERS[flat.element_size()])
    whole = len(bits) - len(bits) % (8 // flat.element_size())
    words = bits[:whole].view(torch.int64)
    in_rows = len(words) - len(words) % _WIDTH
    return [words[:in_rows].view(-1, _WIDTH).sum(1), words[in_rows:], bits[whole:].long()]
