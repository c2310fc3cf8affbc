"""The parts of a loop in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn

STEPS = 12
# one worker's steps are taken as they are
AS_IT_IS: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "local_steps": 3}


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return made


def backward(model: nn.Module, step: int, worker: int = 0) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * worker + step))
    inputs = inputs.to(next(model.parameters()).dtype)
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin()).backward()


def flat(*models: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for model in models for parameter in model.parameters()])
