"""The learning-rate schedule and the optimizers of a simulation."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fairseq_async.server.optimizers.learning_rates import StepSchedule
from fairseq_async.simulation.experiment import OptimizerOptions, ScheduleOptions


class LearningRate:
    """A learning-rate schedule: ``rate(progress)``.

    Progress is counted as in a real run: in steps of the server where gradients are sent, in mean local steps of a
    worker under local SGD, in scale-invariant steps with AdaScale.

    Args:
        lr: the peak.
        steps: progress at the end of the run.
    """

    def __init__(self, options: ScheduleOptions, lr: float, steps: int) -> None:
        self.options, self.lr, self.steps = options, lr, steps

    def __call__(self, progress: float) -> float:
        warmup = self.options.warmup
        if progress < warmup:
            return self.lr * min(1.0, (progress + 1) / warmup)  # progress may lie between two steps
        match self.options.type:
            case "cosine":
                share = min(1.0, (progress - warmup) / max(1, self.steps - warmup))
                falling = 0.5 * (1 + math.cos(math.pi * share))
                return self.lr * (self.options.minimum + (1 - self.options.minimum) * falling)
            case "inverse_sqrt":
                return self.lr * math.sqrt(max(1, warmup) / max(1.0, progress + 1))
        return self.lr


def make_optimizer(options: OptimizerOptions, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Makes torch's optimizer with these options; :func:`set_lr` sets its learning rate before each step."""
    lr, decay = options.lr, options.weight_decay
    if options.type == "sgd":
        return torch.optim.SGD(parameters, lr, options.momentum, weight_decay=decay)
    kind = torch.optim.Adam if options.type == "adam" else torch.optim.AdamW
    return kind(parameters, lr, options.betas, weight_decay=decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class RateSchedule(StepSchedule):
    """The schedule ``rate`` for an optimizer in the server; its progress is the server's steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: LearningRate) -> None:
        super().__init__(optimizer)
        self.rate = rate

    def follow(self, steps: int) -> None:
        """Sets the learning rate for the next step, after so many steps."""
        set_lr(self.optimizer, self.rate(steps))
