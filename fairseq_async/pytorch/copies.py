"""Copies of parameters that an optimizer keeps in its state, which move with the parameters at an exchange."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fairseq_async.worker.replica import TensorReplica

_NEAR = 0.25  # of the squared norm; a moment is about as far from the parameters as they are long, or farther
_PARALLEL = 1 - 1e-5  # squared cosine of a multiple of the gradient, within rounding


class Copies:
    """Finds tensors of the optimizers' states that are copies of parameters, such as slow weights, an average or the
    first values. Schedule-free optimizers, Lookahead, MADGRAD and Prodigy have such.

    A name of the state is of copies if its tensors lie near the parameters of all the model when they are first seen,
    after the step that has made them. Torch's own optimizers step from no copy.

    Hazard: a moment begins as a multiple of the gradient, which may be one of the parameters, as with the loss
    ``parameters.square().sum()``. Such a tensor is no copy.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Sequence[tuple[str, Parameter]]) -> None:
        self._optimizers, self._parameters = optimizers, [parameter for _, parameter in named]
        self._seen: list[set[str]] = [{"step"} for _ in optimizers]
        self._of_copies: list[list[str]] = [[] for _ in optimizers]

    def note(self) -> None:
        """Looks at names that are new in the states."""
        for optimizer, seen, of_copies in zip(self._optimizers, self._seen, self._of_copies, strict=True):
            if type(optimizer).__module__.startswith("torch.optim."):
                continue
            stepped = next((each for each in self._parameters if optimizer.state.get(each)), None)
            for name in sorted(optimizer.state[stepped].keys() - seen if stepped is not None else ()):
                seen.add(name)
                if self._are_near(optimizer, name):
                    of_copies.append(name)

    def pairs(self) -> Iterator[tuple[Tensor, Parameter]]:
        """Yields each copy and its parameter."""
        for optimizer, names in zip(self._optimizers, self._of_copies, strict=True):
            for name in names:
                yield from self._pairs(optimizer, name)

    def _pairs(self, optimizer: Optimizer, name: str) -> Iterator[tuple[Tensor, Parameter]]:
        for parameter in self._parameters:
            value = optimizer.state.get(parameter, {}).get(name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                yield value, parameter

    @torch.no_grad()
    def _are_near(self, optimizer: Optimizer, name: str) -> bool:
        sums = torch.zeros(5, dtype=torch.float64)
        for value, parameter in self._pairs(optimizer, name):
            value, gradient = value.to(parameter), parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter)
            products = [(value - parameter).square(), parameter.square(), value.square(), gradient.square()]
            sums += torch.stack([each.sum().double().cpu() for each in [*products, value * gradient]])
        apart, length, own, of_gradient, common = sums.tolist()
        return apart < _NEAR * length and not common**2 >= _PARALLEL * own * of_gradient > 0


class MovingReplica(TensorReplica):
    """A replica whose parameters take the copies with them, as if those had always been where the parameters are now:
    an optimizer that mixes both would else take the model back to where this worker was by itself.

    Args:
        rest: as of :class:`TensorReplica`.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], is_writer: bool, copies: Copies) -> None:
        super().__init__(named, is_writer)
        self._copies, self._own = copies, {id(tensor) for _, tensor in named}

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        pairs = [(copy, parameter) for copy, parameter in self._copies.pairs() if id(parameter) in self._own]
        for copy, parameter in pairs:
            copy.sub_(parameter)
        super().write(flat)
        for copy, parameter in pairs:
            copy.add_(parameter)

    def part(self, tensors: slice) -> "MovingReplica":
        return MovingReplica(self.named[tensors], self._is_writer, self._copies)
