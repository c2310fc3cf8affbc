"""The base of the outer rules of local SGD: a learning rate, a momentum, and look-ahead along the momentum."""

import math

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State


class MomentumRule:
    """An outer rule with a momentum m, which is zero until the first update.

    With ``start_ahead`` a worker starts its local steps from θ − εβm, where the momentum is about to take the
    parameters, and its pseudo-gradient is relative to that point. The server's parameters stay θ.

    Args:
        lr: ε, the outer learning rate; finite, above 0.
        momentum: β in [0, 1).
        start_ahead: whether workers start ahead, along the momentum.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, start_ahead: bool = False) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"lr is {lr}; it must be finite and above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be at least 0 and below 1")
        self.lr = lr
        self.momentum = momentum
        self.start_ahead = start_ahead
        self.momentum_buffer: Tensor | None = None

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Returns True: every update moves the parameters."""
        return True

    def dispatch(self, parameters: Tensor) -> Tensor:
        """Returns what a worker starts from: θ, or with look-ahead θ − εβm in a new tensor."""
        if not self.start_ahead or self.momentum_buffer is None:
            return parameters
        return parameters.add(self.momentum_buffer, alpha=-self.lr * self.momentum)

    def limit_round(self, updates: int) -> None:
        """Does nothing, since steps do not wait for a round."""

    def state_dict(self) -> State:
        """Returns the momentum; everything else is a setting."""
        return {"momentum_buffer": self.momentum_buffer}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.momentum_buffer = copied(state["momentum_buffer"]) if self.momentum else None

    def _momentum_after(self, gradient: Tensor, factor: float) -> Tensor:
        """Updates m ← βm + factor·gradient, and returns m."""
        if self.momentum_buffer is None:
            self.momentum_buffer = torch.zeros_like(gradient)
        return self.momentum_buffer.mul_(self.momentum).add_(gradient, alpha=factor)


def at_least_one(name: str, value: int) -> int:
    """Returns ``value``, which must be at least 1.

    Raises:
        ValueError: the value is below 1.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def copied(tensor: Tensor | None) -> Tensor | None:
    """Returns a copy of the tensor, or None for None."""
    return None if tensor is None else tensor.clone()
