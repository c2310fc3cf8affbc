"""LAMB as a torch optimizer that runs on a CPU; fairseq's and DeepSpeed's are compiled for GPUs."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

Loss = TypeVar("Loss")


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam with the step of each tensor scaled to the tensor's own norm.

    You et al. 2020, "Large Batch Optimization for Deep Learning" (arXiv 1904.00962, algorithm 2). For each tensor, with
    the moments m̂, v̂ of Adam::

        u = m̂/(√v̂ + eps) + λ·θ        θ ← θ − lr · (|θ| / |u|) · u

    The ratio |θ|/|u| is 1 where one of the norms is 0, as for a bias at its start.

    Args:
        params: the parameters, or groups of them, as of any optimizer of torch.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to √v̂.
        weight_decay: λ.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Takes one step; a closure computes the gradients first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
                    self._update(parameter, parameter.grad, lr, betas, eps, decay)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        state["step"] += 1
        first, second = betas
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(eps)
        update = (state["exp_avg"] / (1 - first ** state["step"])).div_(root).add_(parameter, alpha=decay)
        length, step = parameter.norm(), update.norm()
        ratio = torch.where((length > 0) & (step > 0), length / step, 1.0)
        parameter.sub_(update.mul_(ratio * lr))
