"""Square norms of the gradients of single backward passes, taken by hooks during backward."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

# (parameter, gradient) → |g|, or None where the gradient is not to count
Norm = Callable[[Tensor, Tensor], Tensor | None]


class LocalSquareNorms:
    """Sums |g_i|² over this rank's backward passes, for each group of parameters.

    A hook runs where autograd adds a parameter's gradient to ``.grad``: it sees the gradient of one pass alone, before
    DistributedDataParallel reduces it. Each parameter's hook is called once in a pass, so the largest number of calls
    is the number of passes; a pass in which a parameter has no gradient adds nothing, as it should.

    Args:
        groups: the parameters of each group; those that need no gradient are left out.
        norm: |g| of a parameter's gradient, or None where it is not to count.

    Attributes:
        active: whether the hooks do anything.
        weight: w of the next passes in the sum Σ w|g_i|²; 1 by default.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], norm: Norm) -> None:
        self.active = True
        self.weight = 1.0
        self._norm = norm
        # Norms on a CPU are added up at once: small tensors kept alive during backward would fragment its memory.
        self._sums = [0.0] * len(groups)
        # Norms on a GPU are kept as tensors: to read one would wait for the device.
        self._norms: list[list[Tensor]] = [[] for _ in groups]
        self._weights: list[list[float]] = [[] for _ in groups]
        self._calls: dict[Tensor, int] = {}
        self._nodes = []  # torch keeps only weak references: without these the hooks would be gone
        self._handles = []
        for index, group in enumerate(groups):
            for parameter in group:
                if parameter.requires_grad:
                    self._nodes.append(accumulation_node(parameter))
                    self._handles.append(self._nodes[-1].register_prehook(partial(self._add, index, parameter)))

    @property
    def passes(self) -> int:
        """Backward passes since the last :meth:`clear`."""
        return max(self._calls.values(), default=0)

    def sums(self, device: torch.device) -> Tensor:
        """Returns Σ w|g_i|² of each group since the last :meth:`clear`: float64, shape [groups]."""
        both = zip(self._norms, self._weights, strict=True)
        kept = torch.stack([sum_of_squares(norms, device, weights) for norms, weights in both])
        return kept + torch.tensor(self._sums, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Starts to count a new step's passes."""
        self._calls.clear()
        self._sums = [0.0] * len(self._sums)
        for norms, weights in zip(self._norms, self._weights, strict=True):
            norms.clear()
            weights.clear()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _add(self, group: int, parameter: Tensor, gradients: tuple[Tensor, ...]) -> None:
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
    """Returns the autograd node that adds a parameter's gradient to ``.grad``.

    A hook on the tensor itself would also see the gradients of ``torch.autograd.grad``.
    """
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    return node


def sum_of_squares(norms: Sequence[Tensor], device: torch.device, weights: Sequence[float] | None = None) -> Tensor:
    """Returns Σ w|g|² of these norms |g|: float64, without dimensions."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack([norm.to(device) for norm in norms]).double().square()
    if weights is not None:
        squares = squares * torch.tensor(weights, dtype=torch.float64, device=device)
    return squares.sum()


def plain_norm(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns |g|, whatever the parameter is."""
    return norm_of(gradient)


def norm_of(gradient: Tensor) -> Tensor:
    """Returns |g| in at least float32."""
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(values, dtype=kind)
    return norm
