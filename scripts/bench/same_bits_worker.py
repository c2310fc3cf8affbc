"""A small job: ``same_bits_worker.py pytorch|deepspeed METHOD OPTIONS OUT``; leaves worker 0's model in OUT."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 24


def batches(worker: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs of shape (16, 32) and targets of shape (16, 8), others for each worker, without end."""
    generator = torch.Generator().manual_seed(worker)
    while True:
        inputs = torch.randn(16, 32, generator=generator)
        yield inputs, inputs[:, :8].sin()


def model() -> nn.Module:
    """Returns a perceptron whose initial parameters are always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def in_pytorch(method: str, options: dict[str, Any], out: Path) -> None:
    """Trains in a plain loop."""
    from fairseq_async.torch import AsyncLocalSGD, HybridAsync  # DeepSpeed's jobs do without

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    wrapper = {"hybrid_async": HybridAsync, "local_sgd": AsyncLocalSGD}[method]
    with wrapper(net, optimizer, total_steps=STEPS, run_dir=str(out.with_suffix("")), **options) as training:
        for inputs, targets in batches(training.worker):
            if training.finished:
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
    if training.worker == 0:
        torch.save(net.state_dict(), out)


def in_deepspeed(method: str, options: dict[str, Any], out: Path) -> None:
    """Trains with DeepSpeed's engine."""
    import fairseq_async.deepspeed_plugin as deepspeed  # seconds, and PyTorch's jobs do without

    net = model()
    own = {"method": method, "total_steps": STEPS, "run_dir": str(out.with_suffix("")), **options}
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 10**9,
        "optimizer": adamw,
        "async_training": own,
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    for inputs, targets in batches(engine.worker):
        if engine.finished:
            break
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    if engine.worker == 0:
        torch.save(engine.module.state_dict(), out)


def main() -> None:
    """Trains as the command line says."""
    front_end, method, options, out = sys.argv[1:]
    {"pytorch": in_pytorch, "deepspeed": in_deepspeed}[front_end](method, json.loads(options), Path(out))


if __name__ == "__main__":
    main()
