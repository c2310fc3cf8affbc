"""The pieces of a flat vector that an optimizer steps, and the optimizer's state of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.threads import cut


def pieces(parameters: Tensor) -> list[Parameter]:
    """Cuts a flat vector into parts, for an optimizer that computes each element by itself. On a CPU, stepping one part
    after the other keeps the part in the cache; a step of the whole vector reads memory in each of its operations."""
    return [Parameter(part) for part in cut(parameters)]


class Pieces:
    """The pieces that an optimizer steps: the model's tensors, or contiguous parts of the flat parameters.

    Args:
        optimizer: over the pieces, all in the same storage.
        longest: number of elements of the longest piece in a state, where the optimizer's own pieces are longer, as on
            a GPU: a server on a CPU, whose pieces fit into its cache, takes the same state. 0 where they are not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, longest: int = 0) -> None:
        self._optimizer, self._longest = optimizer, longest
        self._uncut = [list(group["params"]) for group in optimizer.param_groups]
        self._is_cut = False

    @property
    def all(self) -> list[Tensor]:
        """The pieces of all groups."""
        return [piece for group in self._optimizer.param_groups for piece in group["params"]]

    def sizes(self) -> list[list[int]] | None:
        """Returns the sizes of each group's pieces, for a state; None where they are as they were built."""
        return self._saved_sizes() if self._is_cut else None

    def state_dict(self) -> dict[str, Any]:
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

    def load_state_dict(self, state: dict[str, Any], sizes: Sequence[Sequence[int]] | None) -> None:
        """Takes a :meth:`state_dict` of pieces as :meth:`sizes` says."""
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
        groups = [list(map(elements, group["params"])) for group in self._optimizer.param_groups]
        if not self._longest:
            return [[end - start for start, end in group] for group in groups]
        sizes = []
        for group, uncut in zip(groups, self._uncut, strict=True):
            cuts = [cut for start, end in map(elements, uncut) for cut in range(start, end, self._longest)]
            sizes.append([b - a for each in group for a, b in pairwise(_with(cuts, *each))])
        return sizes

    def _join(self) -> None:
        """Makes one of neighbouring pieces that were built as one, and have taken the same steps."""
        for group, uncut in zip(self._optimizer.param_groups, self._uncut, strict=True):
            begins = {elements(each)[0] for each in uncut}
            runs: list[list[Tensor]] = []
            for piece in group["params"]:
                if runs and elements(piece)[0] not in begins and self._steps_as(runs[-1][0], piece):
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

    def cut_at(self, bounds: list[int]) -> None:
        """Cuts each piece in which some of these elements of the storage lie, in front of them."""
        for group in self._optimizer.param_groups:
            pieces: list[Tensor] = []
            for piece in group["params"]:
                cuts = _with(bounds, *elements(piece))
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


def elements(tensor: Tensor) -> tuple[int, int]:
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
