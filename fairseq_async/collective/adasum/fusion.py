"""Many tensors as one long vector that can be cut anywhere, almost without copying."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALL = 1 << 14  # elements; a separate message costs about as much as copying this many

Range = tuple[int, int]  # first element and end


@dataclass(frozen=True)
class FusedPiece:
    """A run of elements that travels as one message.

    Attributes:
        values: flat view.
        parts: which tensor each stretch of ``values`` belongs to: (index of the tensor, first element, end).
    """

    values: Tensor
    parts: list[tuple[int, int, int]]


class Fusion:
    """One vector of all tensors: first the large ones as they lie in memory, then the small ones, copied together.

    All ranks must cut in the same places, or their messages do not match. So the cuts follow from the tensors' sizes
    alone, never from where the tensors lie in memory.

    Args:
        tensors: dense tensors of one type and one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        small = [index for index, tensor in enumerate(tensors) if tensor.numel() < _SMALL]
        large = [index for index, tensor in enumerate(tensors) if tensor.numel() >= _SMALL]
        self._runs = [([index], self.tensors[index].contiguous().view(-1)) for index in large]
        if small:
            self._runs.append((small, torch.cat([self.tensors[index].reshape(-1) for index in small])))
        self.size = sum(values.numel() for _, values in self._runs)

    def pieces(self, start: int, end: int) -> list[FusedPiece]:
        """Returns the elements from ``start`` to ``end`` in pieces, none of which is empty."""
        return list(self._pieces(start, end))

    def write_back(self) -> None:
        """Copies values back to the tensors that are not views of the vector."""
        for indices, values in self._runs:
            offset = 0
            for index in indices:
                tensor = self.tensors[index]
                if tensor.data_ptr() != values.data_ptr():
                    tensor.copy_(values[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()

    def _pieces(self, start: int, end: int) -> Iterator[FusedPiece]:
        offset = 0
        for indices, values in self._runs:
            first, last = max(start - offset, 0), min(end - offset, values.numel())
            if first < last:
                yield FusedPiece(values[first:last], self._parts(indices, first, last))
            offset += values.numel()

    def _parts(self, indices: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
        parts, offset = [], 0
        for index in indices:
            size = self.tensors[index].numel()
            first, last = max(offset, start), min(offset + size, end)
            if first < last:
                parts.append((index, first - start, last - start))
            offset += size
        return parts
