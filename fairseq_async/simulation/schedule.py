"""The learning rate over a run's progress, and optimizers by name."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fairseq_async.simulation.experiment import OptimizerOptions, ScheduleOptions


class LearningRate:
    """``rate(progress)``, progress in mean steps of a worker, of which the run has ``steps``."""

    def __init__(self, options: ScheduleOptions, lr: float, steps: int) -> None:
        self.options, self.lr, self.steps = options, lr, steps

    def __call__(self, progress: float) -> float:
        warmup = self.options.warmup
        if progress < warmup:
            return self.lr * (progress + 1) / warmup
        match self.options.type:
            case "cosine":
                share = min(1.0, (progress - warmup) / max(1, self.steps - warmup))
                falling = 0.5 * (1 + math.cos(math.pi * share))
                return self.lr * (self.options.minimum + (1 - self.options.minimum) * falling)
            case "inverse_sqrt":
                return self.lr * math.sqrt(max(1, warmup) / max(1.0, progress + 1))
        return self.lr


def make_optimizer(options: OptimizerOptions, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """torch's, with its learning rate to be set before each step."""
    lr, decay = options.lr, options.weight_decay
    if options.type == "sgd":
        return torch.optim.SGD(parameters, lr, options.momentum, weight_decay=decay)
    kind = torch.optim.Adam if options.type == "adam" else torch.optim.AdamW
    return kind(parameters, lr, options.betas, weight_decay=decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
