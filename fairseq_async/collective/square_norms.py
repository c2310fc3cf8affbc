"""Square norms of the gradients of single backward passes, taken while they are at hand."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Norm = Callable[[Tensor, Tensor], Tensor | None]


class LocalSquareNorms:
    """Σ|g_i|² over this rank's backward passes, for each group of parameters.

    A hook where a parameter's gradient is added to ``.grad`` sees that of one pass alone, and before
    DistributedDataParallel reduces it. It is called once in a pass, so the most calls of any of them are the passes; a
    pass in which a parameter has no gradient adds nothing, which is what it should add.

    Args:
        groups: parameters; those that need no gradient are left out.
        norm: |g| of a parameter's gradient, or None where it is not to count.

    Attributes:
        active: whether the hooks do anything.
        weight: w of the passes to come, where the sum is to be Σ w|g_i|².
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], norm: Norm) -> None:
        self.active = True
        self.weight = 1.0
        self._norm = norm
        self._sums = [0.0] * len(groups)  # of those on a CPU: to keep them would hold pieces of memory amid the pass's
        self._norms: list[list[Tensor]] = [[] for _ in groups]  # of others, since to read them would wait for them
        self._weights: list[list[float]] = [[] for _ in groups]
        self._calls: dict[Tensor, int] = {}
        self._nodes = []  # torch keeps only a weak reference to them
        self._handles = []
        for index, group in enumerate(groups):
            for parameter in group:
                if parameter.requires_grad:
                    self._nodes.append(accumulation_node(parameter))
                    self._handles.append(self._nodes[-1].register_prehook(partial(self._see, index, parameter)))

    @property
    def passes(self) -> int:
        """Backward passes since the last :meth:`clear`."""
        return max(self._calls.values(), default=0)

    def sums(self, device: torch.device) -> Tensor:
        """float64, shape [groups]."""
        both = zip(self._norms, self._weights, strict=True)
        kept = torch.stack([sum_of_squares(norms, device, weights) for norms, weights in both])
        return kept + torch.tensor(self._sums, dtype=torch.float64, device=device)

    def clear(self) -> None:
        self._calls.clear()
        self._sums = [0.0] * len(self._sums)
        for norms, weights in zip(self._norms, self._weights, strict=True):
            norms.clear()
            weights.clear()

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _see(self, group: int, parameter: Tensor, gradients: tuple[Tensor, ...]) -> None:
        if not self.active:
            return
        self._calls[parameter] = self._calls.get(parameter, 0) + 1
        norm = self._norm(parameter, gradients[0])
        if norm is None:
            return
        if norm.is_cpu:
            self._sums[group] += self.weight * norm.item() ** 2
        else:
            self._norms[group].append(norm)
            self._weights[group].append(self.weight)


def accumulation_node(parameter: Tensor) -> torch.autograd.graph.Node:
    """Where the gradient is added to ``.grad``. A hook on the tensor would see those of ``torch.autograd.grad`` too."""
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    return node


def sum_of_squares(norms: Sequence[Tensor], device: torch.device, weights: Sequence[float] | None = None) -> Tensor:
    """float64, without dimensions."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack([norm.to(device) for norm in norms]).double().square()
    if weights is not None:
        squares = squares * torch.tensor(weights, dtype=torch.float64, device=device)
    return squares.sum()


def plain_norm(parameter: Tensor, gradient: Tensor) -> Tensor:
    """|g|."""
    return norm_of(gradient)


def norm_of(gradient: Tensor) -> Tensor:
    """|g| in at least float32."""
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dtype=kind)
