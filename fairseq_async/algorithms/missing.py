"""Tensors without a gradient in an update: a step leaves them alone, as torch's optimizers do where ``grad`` is None.

The tensors are the bits of a number: bit n is set where tensor n of the model has no gradient.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


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
        optimizer: over the model's tensors, or over contiguous flat pieces of them.
        tensors: the tensors of the model, in its order, in the same storage; others than these are never hidden.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> None:
        self._optimizer, self._tensors = optimizer, tensors
        self._uncut = [list(group["params"]) for group in optimizer.param_groups]
        self._is_cut = False

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

    def sizes(self) -> list[list[int]] | None:
        """Returns the sizes of each group's pieces, for a state; None where they are as they were built."""
        groups = self._optimizer.param_groups
        return [[piece.numel() for piece in group["params"]] for group in groups] if self._is_cut else None

    def restore(self, sizes: Sequence[Sequence[int]] | None) -> None:
        """Cuts the pieces as :meth:`sizes` says; the state is to be loaded after it."""
        self._is_cut = sizes is not None
        for number, (group, uncut) in enumerate(zip(self._optimizer.param_groups, self._uncut, strict=True)):
            group["params"] = list(uncut) if sizes is None else list(_recut(uncut, sizes[number]))

    def cut_into_tensors(self) -> None:
        """Cuts the pieces at the bounds of all tensors, so that each has a state of its own."""
        self._cut_at(sorted({start for start, _ in map(_elements, self._tensors)}))

    def _hidden(self, missing: int) -> list[Tensor]:
        """Returns the missing tensors, and the optimizer's pieces of them, each once."""
        hidden = [tensor for number, tensor in enumerate(self._tensors) if missing >> number & 1]
        bounds: list[int] = []  # of runs of missing tensors: where the first begins, and where it ends, and so on
        for start, end in sorted(map(_elements, hidden)):
            if bounds and bounds[-1] == start:
                bounds[-1] = end
            elif start < end:
                bounds += [start, end]
        self._cut_at(bounds)
        pieces = [piece for group in self._optimizer.param_groups for piece in group["params"]]
        hidden += [piece for piece in pieces if bisect_right(bounds, piece.storage_offset()) % 2]
        return list({id(tensor): tensor for tensor in hidden}.values())

    def _cut_at(self, bounds: list[int]) -> None:
        """Cuts each piece in which some of these elements of the storage lie, in front of them."""
        for group in self._optimizer.param_groups:
            pieces: list[Tensor] = []
            for piece in group["params"]:
                start, end = _elements(piece)
                inside = bounds[bisect_right(bounds, start) : bisect_left(bounds, end)]
                pieces += self._parts(piece, [b - a for a, b in pairwise([start, *inside, end])]) if inside else [piece]
            self._is_cut = self._is_cut or len(pieces) > len(group["params"])
            group["params"] = pieces

    def _parts(self, piece: Tensor, sizes: list[int]) -> list[Parameter]:
        parts = [Parameter(part) for part in piece.detach().split(sizes)]
        gradients = [None] * len(sizes) if piece.grad is None else piece.grad.split(sizes)
        states = _split(self._optimizer.state.pop(piece, {}), piece, sizes)
        for part, gradient, state in zip(parts, gradients, states, strict=True):
            part.grad = gradient
            if state:
                self._optimizer.state[part] = state
        return parts


def _elements(tensor: Tensor) -> tuple[int, int]:
    """Returns the first element of a contiguous tensor in its storage, and the one behind the last."""
    start = int(tensor.storage_offset())
    return start, start + tensor.numel()


def _recut(pieces: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yields parts of the pieces of these sizes, which never go over the end of a piece."""
    waiting = iter(sizes)
    for piece in pieces:
        own = [next(waiting)]
        while sum(own) < piece.numel():
            own.append(next(waiting))
        yield from [piece] if len(own) == 1 else map(Parameter, piece.detach().split(own))


def _split(state: dict[str, Any], piece: Tensor, sizes: list[int]) -> list[dict[str, Any]]:
    """Returns the state of each part of a piece: the part of each tensor with a value for each element, and copies of
    all else."""
    parts: list[dict[str, Any]] = [{} for _ in sizes]
    for key, value in state.items():
        if not isinstance(value, Tensor):
            values = [value] * len(sizes)
        elif value.shape == piece.shape:
            values = [part.clone() for part in value.split(sizes)]
        else:
            values = [value.clone() for _ in sizes]
        for part, own in zip(parts, values, strict=True):
            part[key] = own
    return parts
