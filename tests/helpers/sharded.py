"""A model of six tensors, methods for it, and a script, for servers in shards."""

from typing import Any

import torch

from fairseq_async.method.methods import outer_rule
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup

SIZES = (7, 70_001, 33, 1, 65_537, 900)
LAYOUT = Layout.of([(f"t{number}", torch.zeros(size)) for number, size in enumerate(SIZES)])
ADAM = OptimizerSpec("Adam", [ParameterGroup([0, 1, 3], {"lr": 0.1}), ParameterGroup([2, 4, 5], {"lr": 0.02})])
MISSING = (0, 0, 0b011010, 0b010011, 0, 0b110000, 0b111111)  # tensors without a gradient; 1 and 4 in a whole step
OUTER: dict[str, dict[str, Any]] = {
    "diloco": {},
    "nesterov": {"look_ahead": True},
    "buffered_nesterov": {},
    "delayed_nesterov": {"look_ahead": True},
    "sgd": {},
    "mla": {},  # looks ahead by default, as the next two
    "heloco": {},
    "direction_averaging": {"quorum": 2},
    "heavy_ball": {},
    "adam": {},
    "adamw": {},
}

SCRIPT = """
import time
import torch
from fairseq_async.torch import HybridAsync

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
with METHOD as worker:
    torch.manual_seed(worker.worker)
    while not worker.finished:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        time.sleep(0.01)
if worker.worker == 0:
    torch.save(model(torch.eye(8)), "answers.pt")
"""


def options_of(outer: str) -> LocalSGDOptions:
    return outer_rule(outer).options(outer=outer, **OUTER[outer])
