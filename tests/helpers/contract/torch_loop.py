"""A loop in plain PyTorch."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from tests.helpers.contract.net import DECAY, HALF, RATE, STEPS, WARM, Net, Run, factor, settings


def train(net: Net, run: Run) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    scheduler = LambdaLR(optimizer, factor) if run.case.has_schedule else None

    def step() -> None:
        optimizer.zero_grad()
        net(**run.batch(net.batches))["loss"].backward()
        if run.case.rate:
            optimizer.param_groups[0]["lr"] = run.case.rate(net.batches - 1)
        optimizer.step()
        often = run.case.steps_schedule
        for _ in range((often(net.batches - 1) if often else 1) if scheduler else 0):
            scheduler.step()  # type: ignore[union-attr]

    for _ in range(WARM if run.case.brings_state else 0):
        step()
    saved = torch.load(f"{run.before}.saved", weights_only=True) if run.case.goes_on else {}
    parts: dict[str, Any] = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    for name, state in saved.items():
        parts[name].load_state_dict(state)
    block: Any = nullcontext()
    if run.method != "plain":
        given = {"scheduler": scheduler, "total_steps": STEPS, "run_dir": str(run.path), **settings(run)}
        made: Any = AsyncLocalSGD if run.method == "local_sgd" else HybridAsync
        block = made(net, optimizer, **given)
        block.load_state_dict(torch.load(f"{run.before}.server", weights_only=True) if saved else {})
    if run.method == "local_sgd" and run.case.steps_schedule is None:
        scheduler = None  # it follows the run by itself
    with block as training:
        taken = 0
        while not training.finished if training else taken < run.steps:
            step()
            taken += 1
            if run.case.saves and training and taken == HALF:
                with training.server_parameters():
                    torch.save(training.state_dict(), f"{run.path}.server")
                    torch.save({name: each.state_dict() for name, each in parts.items()}, f"{run.path}.saved")
