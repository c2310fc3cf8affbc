"""A loop with accelerate and without a Trainer; what accelerate does beside the steps, and the line that ends it."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync, enter_island
from tests.helpers.contract.net import BATCH, DECAY, RATE, STEPS, Case, Net, Run, factor, settings


@dataclass(frozen=True)
class Loop(Case):
    """``wrapped`` is what the block is given in accelerate's own wrapper."""

    precision: str = "no"
    wrapped: str = ""
    loads: bool = False  # amid the run


def refused(hybrid_async: str, local_sgd: str, **what: Any) -> Loop:
    return Loop(compared=False, hybrid_async=hybrid_async, local_sgd=local_sgd, **what)


OPTIMIZER = "optimizer is a AcceleratedOptimizer, which wraps another: give that one, optimizer.optimizer"
SCHEDULER = "scheduler is a AcceleratedScheduler, which wraps another: give that one, scheduler.scheduler"
LOADED = "the state of the optimizer was loaded or cleared during the run"
CASES: dict[str, Case] = {
    "accumulating": Loop(micro_batches=3),
    "in bf16 with a schedule": Loop(micro_batches=2, precision="bf16", has_schedule=True),
    "a wrapped optimizer": refused(OPTIMIZER, OPTIMIZER, wrapped="optimizer"),
    "a wrapped schedule": refused(SCHEDULER, SCHEDULER, wrapped="scheduler", has_schedule=True),
    "load_state in the loop": refused(LOADED, "", loads=True),
}


def train(net: Net, run: Run) -> None:
    case = run.case if isinstance(run.case, Loop) else Loop()  # another case where a launcher starts this
    if "RANK" in os.environ:
        enter_island(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.micro_batches,
        mixed_precision=case.precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # which has one rank then
    )
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    scheduler: Any = LambdaLR(optimizer, factor) if case.has_schedule else None
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(run.rows(), batch_size=BATCH))
    block: Any = nullcontext()
    if run.method != "plain":
        made: Any = AsyncLocalSGD if run.method == "local_sgd" else HybridAsync
        followed = accelerator.prepare(scheduler) if case.wrapped == "scheduler" else scheduler
        own = {"scheduler": followed, "total_steps": STEPS, "run_dir": str(run.path), **settings(run)}
        block = made(model, optimizer if case.wrapped == "optimizer" else optimizer.optimizer, **own)
    taken = 0
    with block as training:
        while not training.finished if training else taken < STEPS:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                taken += accelerator.sync_gradients
                if scheduler is not None and training is None and accelerator.sync_gradients:
                    scheduler.step()
                if case.loads and taken == 2:
                    accelerator.save_state(f"{run.path}.state")
                    accelerator.load_state(f"{run.path}.state")
                if training.finished if training else taken == STEPS:
                    break
