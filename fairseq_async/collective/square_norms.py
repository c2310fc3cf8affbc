"""Square norms of the gradients of single backward passes, taken while they are at hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError

Norm = Callable[[Tensor, Tensor], Tensor | None]
# the tensor that an optimizer steps for a parameter, and where the parameter's elements begin in it
Masters = Mapping[Tensor, tuple[Tensor, int]]


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
        self._norms: list[list[Tensor]] = [[] for _ in groups]
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
        return torch.stack([sum_of_squares(norms, device, weights) for norms, weights in both])

    def clear(self) -> None:
        self._calls.clear()
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
        if norm is not None:
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
    return _norm(gradient)


class AdamNorm:
    """|g / (√v̂ + eps)|, with v̂ of the step before: the length that an Adam step sees.

    Args:
        optimizer: Adam, or one that keeps ``exp_avg_sq`` and ``step`` for a parameter as it does. A parameter counts
            after :attr:`STEPS` of its steps, because v̂ is no scale before; so does an element after its first gradient,
            because 1/eps would make it count alone.
        masters: where the parameters are that the optimizer steps; see :class:`AdaScale`.

    Keeps √v̂ + eps, as large as the parameters, for all the gradients of a step.

    Raises:
        ConfigurationError: on a call, if the optimizer does not keep ``exp_avg_sq``.
    """

    STEPS = 5

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters | None = None) -> None:
        self.optimizer = optimizer
        self._masters = masters or {}
        self._groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        # in this step: √v̂ + eps, and room for g divided by it; None for a parameter that does not count yet
        self._ready: dict[Tensor, tuple[Tensor, Tensor] | None] = {}
        self._denominators: dict[Tensor, Tensor] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if parameter not in self._ready:
            self._ready[parameter] = self._prepare(parameter)
        ready = self._ready[parameter]
        return None if ready is None else _norm(torch.div(gradient.detach(), ready[0], out=ready[1]))

    def forget(self) -> None:
        """The optimizer steps, or has loaded another state."""
        self._ready.clear()

    def _prepare(self, parameter: Tensor) -> tuple[Tensor, Tensor] | None:
        master, start = self._masters.get(parameter, (parameter, 0))
        group, state = self._groups[master], self.optimizer.state.get(master, {})
        steps = float(state.get("step", group.get("step", 0)))  # fused optimizers keep it in the group
        if steps < self.STEPS:
            return None
        if "exp_avg_sq" not in state:
            name = type(self.optimizer).__name__
            raise ConfigurationError(f"AdaScale: adaptive=True is for Adam and its kin, and {name} keeps no exp_avg_sq")
        second = state["exp_avg_sq"].view(-1)[start : start + parameter.numel()].view(parameter.shape)
        denominator = self._denominators.get(parameter)
        if denominator is None or denominator.shape != second.shape or denominator.dtype != second.dtype:
            denominator = self._denominators[parameter] = torch.empty_like(second)
        torch.sqrt(second, out=denominator)
        torch.nn.functional.threshold(denominator, 0.0, math.inf, inplace=True)  # an element with √0 does not count
        correction = 1 / math.sqrt(1 - group["betas"][1] ** steps)
        torch.add(denominator.new_tensor(group["eps"]), denominator, alpha=correction, out=denominator)
        return denominator, self._room(denominator)

    def _room(self, like: Tensor) -> Tensor:
        """Memory that stays, because fresh memory is slow when it is touched first."""
        room = self._scratch.get((like.dtype, like.device), like.new_empty(0))
        if room.numel() < like.numel():
            room = self._scratch[like.dtype, like.device] = torch.empty(
                like.numel(), dtype=like.dtype, device=like.device
            )
        return room[: like.numel()].view(like.shape)


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dtype=kind)
