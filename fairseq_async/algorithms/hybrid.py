"""Hybrid asynchronous SGD: sum several asynchronous gradients, then step."""

from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms.update import Update


class HybridAccumulation:
    """Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers"
    (arXiv 1906.03496, section 3).

    ::

        acc += g;  count += 1
        if count == N:  θ = Optimizer(θ, acc);  acc = 0;  count = 0

    The accumulator is kept as the mean over the tokens seen so far, Σ wᵢgᵢ / Σ wᵢ, so that the step is the one
    a synchronous run would take on the same batches. With N = 1 this is plain asynchronous SGD, and the
    optimizer sees the worker's gradient unchanged, to the bit.

    Args:
        optimizer: a torch optimizer over ``parameters``, as one tensor or as views into it.
        updates_per_step: N, at least 1.
        clip_norm: largest L2 norm of the aggregated gradient; 0 does not clip.

    Raises:
        ValueError: N below 1, or a negative ``clip_norm``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, updates_per_step: int, clip_norm: float = 0.0) -> None:
        if updates_per_step < 1:
            raise ValueError(f"updates_per_step is {updates_per_step}; it must be at least 1")
        if clip_norm < 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must not be negative")
        self.optimizer = optimizer
        self.updates_per_step = self._wanted = updates_per_step
        self.clip_norm = clip_norm
        self.mean: Tensor | None = None
        self.weight = 0.0
        self.count = 0

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Adds one mean gradient; steps the optimizer, and returns True, on every N-th."""
        mean = self._accumulator(parameters)
        self.weight += update.weight
        if self.count == 0:
            mean.copy_(update.delta)
        elif update.weight > 0:
            mean.lerp_(update.delta, update.weight / self.weight)
        self.count += 1
        if self.count < self.updates_per_step:
            return False
        if self.clip_norm > 0:
            self._clip()
        self.optimizer.step()
        self.weight, self.count = 0.0, 0
        return True

    @property
    def changes_next(self) -> bool:
        return self.count + 1 >= self.updates_per_step

    @property
    def direction(self) -> None:
        return None

    def limit_round(self, updates: int) -> None:
        """A step waits for no more gradients than a round has."""
        self.updates_per_step = min(self._wanted, updates)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the gradients that wait for their step."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean if self.count else None,
            "weight": self.weight,
            "count": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.weight, self.count = state["weight"], state["count"]
        if state["mean"] is not None:
            self._accumulator(state["mean"]).copy_(state["mean"])

    def _accumulator(self, parameters: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(parameters, requires_grad=False)
            for tensor in self._optimized():  # each gradient lies where its parameter lies
                tensor.grad = self.mean.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self.mean

    def _clip(self) -> None:
        """As ``torch.nn.utils.clip_grad_norm_``, but for the pass over memory that multiplies by 1."""
        tensors = self._optimized()
        norm = torch.nn.utils.get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None])
        if norm + 1e-6 > self.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(tensors, self.clip_norm, norm)

    def _optimized(self) -> list[Tensor]:
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
