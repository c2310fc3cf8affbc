"""A loop in plain PyTorch."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from tests.helpers.contract.net import DECAY, LOCAL, RATE, STEPS, Net, batches


def train(net: Net, method: str, path: Path) -> nn.Module:
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    common: dict[str, Any] = {"total_steps": STEPS, "run_dir": str(path)}
    blocks = {
        "plain": nullcontext,
        "hybrid_async": lambda: HybridAsync(net, optimizer, updates_per_step=1, **common),
        "local_sgd": lambda: AsyncLocalSGD(net, optimizer, **LOCAL, **common),
    }
    with blocks[method]():
        for batch in batches():
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            optimizer.step()
    return net
