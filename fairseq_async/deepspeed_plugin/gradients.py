"""Where a DeepSpeed engine keeps the gradients that its optimizer is about to step with."""

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from fairseq_async.collective.adam_norm import Masters


def of(engine: DeepSpeedEngine) -> list[Tensor]:
    """All of them on this rank, after DeepSpeed's reduction: with ZeRO this rank's partition."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "averaged_gradients") or isinstance(optimizer, BF16_Optimizer):
        return [part for parts in reduced(engine) for part in parts]
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def reduced(engine: DeepSpeedEngine) -> list[list[Tensor]]:
    """The same for each parameter group, where the optimizer keeps fp32 masters."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "averaged_gradients"):  # ZeRO 1 and 2
        return [list(parts or []) for _, parts in sorted(optimizer.averaged_gradients.items())]
    if isinstance(optimizer, BF16_Optimizer):
        return [list(parts) for parts in optimizer.fp32_groups_gradients]
    return [[each.grad for each in group if each.grad is not None] for group in _groups(optimizer)]


def masters(optimizer: Any) -> Masters | None:
    """For each parameter of the model a tensor of its parameter group, where the optimizer steps others than it."""
    groups = _groups(optimizer)
    if not groups:
        return None
    stepped = [group["params"][0] for group in optimizer.param_groups]
    return {parameter: (first, 0) for group, first in zip(groups, stepped, strict=True) for parameter in group}


def has_own_check(optimizer: Any) -> bool:
    """Whether a step with NaN in it is skipped by the optimizer."""
    return bool(_groups(optimizer))


def _groups(optimizer: Any) -> list[list[Tensor]]:
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return []
