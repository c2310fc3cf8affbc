"""Outer optimizers that Liu et al. 2024 (arXiv 2401.09135, figure 5) compare with: heavy ball, Adam and AdamW."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fairseq_async.algorithms.outer.momentum_rule import MomentumRule, at_least_one, copied
from fairseq_async.algorithms.rule import State, Update
from fairseq_async.method.methods import RuleContext
from fairseq_async.options.config import AsyncLocalSGDOptions, OuterLearningRate, OuterMomentum, StartAhead


class HeavyBallOptions(AsyncLocalSGDOptions):
    """``outer heavy_ball``: one step with Polyak's momentum per arrival."""

    outer: Literal["heavy_ball"] = "heavy_ball"
    outer_lr: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9
    start_ahead: StartAhead = False


class OuterAdamOptions(AsyncLocalSGDOptions):
    """``outer adam``: one step of Adam per arrival, with β₂ 0.999 and ε 1e-8."""

    outer: Literal["adam"] = "adam"
    outer_lr: OuterLearningRate = 1e-3
    outer_momentum: OuterMomentum = 0.9


class OuterAdamWOptions(AsyncLocalSGDOptions):
    """``outer adamw``: as ``outer adam``, with decoupled weight decay."""

    outer: Literal["adamw"] = "adamw"
    outer_lr: OuterLearningRate = 1e-3
    outer_momentum: OuterMomentum = 0.9
    outer_weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of the outer optimizer")


class HeavyBall(MomentumRule):
    """Heavy ball: takes one step with Polyak's momentum for each update δ, on δ/k.

    ::

        m ← βm + δ/k;  θ ← θ − εm

    Args:
        lr: ε, the outer learning rate.
        momentum: β in [0, 1).
        workers: k, the number of workers.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, lr: float, momentum: float, workers: int, start_ahead: bool = False) -> None:
        super().__init__(lr, momentum, start_ahead)
        self.workers = at_least_one("workers", workers)

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        parameters.add_(self._momentum_after(update.delta, 1 / self.workers), alpha=-self.lr)
        return True


class OuterAdam(MomentumRule):
    """Takes one step of Adam (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1) for each update δ, on g = δ/k; with a
    weight decay, one step of AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2).

    ::

        θ ← (1 − ε·decay)θ
        m ← β₁m + (1 − β₁)g;  v ← β₂v + (1 − β₂)g²
        θ ← θ − ε · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + eps)

    Args:
        lr: ε, the outer learning rate.
        momentum: β₁ in [0, 1).
        workers: k, the number of workers.
        beta2: β₂ in [0, 1).
        eps: added to the square root; above 0.
        weight_decay: ``decay`` of the formula, at least 0.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        momentum: float,
        workers: int,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, momentum)
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 is {beta2}; it must be at least 0 and below 1")
        if not (weight_decay >= 0 and eps > 0):
            raise ValueError(f"weight_decay is {weight_decay} and eps {eps}; not below 0, and above 0")
        self.workers = at_least_one("workers", workers)
        self.beta2, self.eps, self.weight_decay = beta2, eps, weight_decay
        self.squares: Tensor | None = None
        self.steps = 0

    def apply(self, parameters: Tensor, update: Update) -> bool:
        """Applies one update with a step; always returns True."""
        if self.squares is None:
            self.squares = torch.zeros_like(update.delta)
        self.steps += 1
        gradient = update.delta / self.workers
        momentum = self._momentum_after(gradient, 1 - self.momentum)
        self.squares.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = (self.squares / (1 - self.beta2**self.steps)).sqrt_().add_(self.eps)
        parameters.mul_(1 - self.lr * self.weight_decay)
        parameters.addcdiv_(momentum, root, value=-self.lr / (1 - self.momentum**self.steps))
        return True

    def state_dict(self) -> State:
        """Returns both moments and the number of steps."""
        return super().state_dict() | {"squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.squares, self.steps = copied(state["squares"]), state["steps"]


def heavy_ball(options: HeavyBallOptions, context: RuleContext) -> HeavyBall:
    """Builds ``outer heavy_ball``."""
    return HeavyBall(options.outer_lr, options.outer_momentum, context.workers, options.start_ahead)


def adam(options: OuterAdamOptions, context: RuleContext) -> OuterAdam:
    """Builds ``outer adam``."""
    return OuterAdam(options.outer_lr, options.outer_momentum, context.workers)


def adamw(options: OuterAdamWOptions, context: RuleContext) -> OuterAdam:
    """Builds ``outer adamw``."""
    decay = options.outer_weight_decay
    return OuterAdam(options.outer_lr, options.outer_momentum, context.workers, weight_decay=decay)
