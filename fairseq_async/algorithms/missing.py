"""Tensors without a gradient in an update: a step leaves them alone, as torch's optimizers do where ``grad`` is None.

The tensors are the bits of a number: bit n is set where tensor n of the model has no gradient.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from torch import Tensor

from fairseq_async.algorithms.pieces import Pieces, elements


def missing_of(gradients: Iterable[object | None]) -> int:
    """Returns which of these gradients, one for each tensor of the model, are None."""
    missing = 0
    for number, gradient in enumerate(gradients):
        missing |= int(gradient is None) << number
    return missing


def tensors_of(missing: int) -> list[int]:
    """Returns the numbers of the missing tensors."""
    return [number for number in range(missing.bit_length()) if missing >> number & 1]


def missing_here(missing: int, tensors: slice) -> int:
    """Returns which of the model's missing tensors are among these, counted from the first of these."""
    first, last = int(tensors.start), int(tensors.stop)
    return missing >> first & (1 << last - first) - 1


def elements_of(missing: int, sizes: Sequence[int]) -> list[slice]:
    """Returns where missing tensors lie in a flat vector of the model's tensors, which have these sizes."""
    bounds = list(accumulate(sizes, initial=0)) if missing else []
    return [slice(bounds[number], bounds[number + 1]) for number in tensors_of(missing)]


def clear(vector: Tensor, parts: Iterable[slice]) -> Tensor:
    """Sets these parts of a flat vector to 0, in place; returns the vector."""
    for part in parts:
        vector[part].zero_()
    return vector


class HiddenGradients:
    """Lets an optimizer step without some of the model's tensors.

    The optimizer may step pieces that hold several tensors. A piece is cut at the bounds of a tensor when that is
    missing for the first time; the state is cut with it, and both parts go on from the same step count. A model whose
    tensors always have gradients keeps its pieces.

    Args:
        pieces: what the optimizer steps: the model's tensors, or contiguous flat pieces of them.
        tensors: the tensors of the model, in its order, in the same storage; others than these are never hidden.
    """

    def __init__(self, pieces: Pieces, tensors: Sequence[Tensor]) -> None:
        self._pieces, self._tensors = pieces, tensors

    @contextmanager
    def without(self, missing: int) -> Iterator[None]:
        """Within it, the gradients of missing tensors are None."""
        hidden = self._hidden(missing) if missing else []
        gradients = [tensor.grad for tensor in hidden]
        for tensor in hidden:
            tensor.grad = None
        try:
            yield
        finally:
            for tensor, gradient in zip(hidden, gradients, strict=True):
                tensor.grad = gradient

    def cut_into_tensors(self) -> None:
        """Cuts the pieces at the bounds of all tensors, so that each has a state of its own."""
        self._pieces.cut_at(sorted({start for start, _ in map(elements, self._tensors)}))

    def _hidden(self, missing: int) -> list[Tensor]:
        """Returns the missing tensors, and the optimizer's pieces of them, each once."""
        hidden = [tensor for number, tensor in enumerate(self._tensors) if missing >> number & 1]
        bounds: list[int] = []  # of runs of missing tensors: where the first begins, and where it ends, and so on
        for start, end in sorted(map(elements, hidden)):
            if bounds and bounds[-1] == start:
                bounds[-1] = end
            elif start < end:
                bounds += [start, end]
        self._pieces.cut_at(bounds)
        hidden += [piece for piece in self._pieces.all if bisect_right(bounds, piece.storage_offset()) % 2]
        return list({id(tensor): tensor for tensor in hidden}.values())
