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
        longest: number of elements of the longest piece in a state, where the optimizer's own pieces are longer, as on
            a GPU: a server on a CPU, whose pieces fit into its cache, takes the same state. 0 where they are not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], longest: int = 0) -> None:
        self._optimizer, self._tensors, self._longest = optimizer, tensors, longest
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
        return self._saved_sizes() if self._is_cut else None

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the optimizer's state of the pieces, none of which is longer than ``longest``."""
        state = self._optimizer.state_dict()
        if not self._longest:
            return state
        own, parts, groups = state["state"], dict[int, Any](), list[dict[str, Any]]()
        for group, pieces, sizes in zip(
            state["param_groups"], self._optimizer.param_groups, self._saved_sizes(), strict=True
        ):
            first, waiting = sum(len(each["params"]) for each in groups), iter(sizes)
            for number, piece in zip(group["params"], pieces["params"], strict=True):
                taken = _taken(waiting, piece.numel())
                parts |= enumerate(_split(own.get(number, {}), piece, taken, copies=False), first)
                first += len(taken)
            groups.append(group | {"params": list(range(first - len(sizes), first))})
        return {"state": {number: part for number, part in parts.items() if part}, "param_groups": groups}

    def load(self, state: dict[str, Any], sizes: Sequence[Sequence[int]] | None) -> None:
        """Takes an :meth:`optimizer_state` of pieces as :meth:`sizes` says."""
        self._is_cut = sizes is not None
        for group, uncut in zip(self._optimizer.param_groups, self._uncut, strict=True):
            group["params"] = list(uncut)
        if self._longest and sizes is None:
            sizes = self._saved_sizes()
        for group, own in zip(self._optimizer.param_groups, sizes or (), strict=sizes is not None):
            group["params"] = list(_recut(group["params"], own))
        self._optimizer.load_state_dict(state)
        if self._longest:
            self._join()

    def _saved_sizes(self) -> list[list[int]]:
        """Returns the sizes of each group's pieces in a state. Long ones are cut as on a CPU: by equal steps from where
        they begin as they were built."""
        groups = [list(map(_elements, group["params"])) for group in self._optimizer.param_groups]
        if not self._longest:
            return [[end - start for start, end in group] for group in groups]
        sizes = []
        for group, uncut in zip(groups, self._uncut, strict=True):
            cuts = [cut for start, end in map(_elements, uncut) for cut in range(start, end, self._longest)]
            sizes.append([b - a for each in group for a, b in pairwise(_with(cuts, *each))])
        return sizes

    def _join(self) -> None:
        """Makes one of neighbouring pieces that were built as one, and have taken the same steps."""
        for group, uncut in zip(self._optimizer.param_groups, self._uncut, strict=True):
            begins = {_elements(each)[0] for each in uncut}
            runs: list[list[Tensor]] = []
            for piece in group["params"]:
                if runs and _elements(piece)[0] not in begins and self._steps_as(runs[-1][0], piece):
                    runs[-1].append(piece)
                else:
                    runs.append([piece])
            group["params"] = [self._joined(run) if len(run) > 1 else run[0] for run in runs]
            self._is_cut = self._is_cut and len(runs) > len(uncut)

    def _steps_as(self, one: Tensor, other: Tensor) -> bool:
        """Whether two pieces differ in nothing but values of their elements."""
        first, second = ({**self._optimizer.state.get(each, {})} for each in (one, other))
        return first.keys() == second.keys() and all(
            _is_of(value, one) or bool(torch.as_tensor(value == second[key]).all()) for key, value in first.items()
        )

    def _joined(self, pieces: list[Tensor]) -> Parameter:
        whole = Parameter(pieces[0].detach().as_strided((sum(map(Tensor.numel, pieces)),), (1,)))
        states = [self._optimizer.state.pop(piece, {}) for piece in pieces]
        for key, value in states[0].items():
            same = torch.cat([state[key] for state in states]) if _is_of(value, pieces[0]) else value
            self._optimizer.state[whole][key] = same
        return whole

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
                cuts = _with(bounds, *_elements(piece))
                pieces += self._parts(piece, [b - a for a, b in pairwise(cuts)]) if len(cuts) > 2 else [piece]
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
        own = _taken(waiting, piece.numel())
        yield from [piece] if len(own) == 1 else map(Parameter, piece.detach().split(own))


def _taken(sizes: Iterator[int], size: int) -> list[int]:
    """Takes the next sizes, which together are this one."""
    own = [next(sizes)]
    while sum(own) < size:
        own.append(next(sizes))
    return own


def _with(bounds: list[int], start: int, end: int) -> list[int]:
    """Returns start and end, and the bounds between them."""
    return [start, *bounds[bisect_right(bounds, start) : bisect_left(bounds, end)], end]


def _is_of(value: Any, piece: Tensor) -> bool:
    """Whether a value of a state is a tensor with a value for each element."""
    return isinstance(value, Tensor) and value.shape == piece.shape


def _split(state: dict[str, Any], piece: Tensor, sizes: list[int], copies: bool = True) -> list[dict[str, Any]]:
    """Returns the state of each part of a piece: of a tensor with a value for each element its part, or a copy of that,
    and copies of all else."""
    parts: list[dict[str, Any]] = [{} for _ in sizes]
    for key, value in state.items():
        if not isinstance(value, Tensor):
            values = [value] * len(sizes)
        elif _is_of(value, piece):
            values = [part.clone() if copies else part for part in value.split(sizes)]
        else:
            values = [value.clone() for _ in sizes]
        for part, own in zip(parts, values, strict=True):
            part[key] = own
    return parts
