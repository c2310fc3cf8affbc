"""What the outer rules of local SGD have in common: a learning rate, and a momentum to look along."""

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State


class MomentumRule:
    """An outer rule with a momentum m, which is zero until the first update.

    With ``look_ahead`` a worker starts its local steps from θ − εβm, where the momentum is about to take the
    parameters, and its pseudo-gradient is relative to that. The parameters themselves stay θ.

    Args:
        lr: ε, above 0.
        momentum: β in [0, 1).

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, look_ahead: bool = False) -> None:
        if lr <= 0:
            raise ValueError(f"lr is {lr}; it must be above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be at least 0 and below 1")
        self.lr = lr
        self.momentum = momentum
        self.look_ahead = look_ahead
        self.momentum_buffer: Tensor | None = None

    def moves_parameters(self, ahead: int = 0) -> bool:
        """Every arrival moves them."""
        return True

    def dispatch(self, parameters: Tensor) -> Tensor:
        """What a worker is given: θ, or θ − εβm in a tensor of its own."""
        if not self.look_ahead or self.momentum_buffer is None:
            return parameters
        return parameters.add(self.momentum_buffer, alpha=-self.lr * self.momentum)

    def limit_round(self, updates: int) -> None:
        """Steps do not wait for a round."""

    def state_dict(self) -> State:
        """The momentum; the rest is settings."""
        return {"momentum_buffer": self.momentum_buffer}

    def load_state_dict(self, state: State) -> None:
        """Goes on from :meth:`state_dict`."""
        self.momentum_buffer = copied(state["momentum_buffer"])

    def _momentum_after(self, gradient: Tensor, factor: float) -> Tensor:
        """m ← βm + factor·gradient"""
        if self.momentum_buffer is None:
            self.momentum_buffer = torch.zeros_like(gradient)
        return self.momentum_buffer.mul_(self.momentum).add_(gradient, alpha=factor)


def at_least_one(name: str, value: int) -> int:
    """The value.

    Raises:
        ValueError: it is below 1.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def copied(tensor: Tensor | None) -> Tensor | None:
    """A copy, where there is a tensor."""
    return None if tensor is None else tensor.clone()
