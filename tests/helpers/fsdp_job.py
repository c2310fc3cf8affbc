"""A loop round a model of FSDP2: ``fsdp_job.py METHOD PRECISION OUT``, with a METHOD of these.

METHOD is plain, hybrid, local, half, copying or mortal. A worker has two ranks, but for "plain", which has no run. Each
rank leaves the whole parameters in OUT-RANK.pt. The server takes half of a round in "half", where SGD steps, and in
"copying", whose optimizer has copies of parameters. In "mortal", rank 1 of worker 1 dies once.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fairseq_async.environment import RANKS
from fairseq_async.torch import AsyncLocalSGD, HybridAsync, enter_island
from tests.helpers.anchored import Anchored
from tests.helpers.plain_loop import AS_IT_IS, STEPS, net

METHODS: dict[str, Any] = {
    "hybrid": partial(HybridAsync, barrier=True),
    "local": partial(AsyncLocalSGD, **AS_IT_IS),
    "half": partial(AsyncLocalSGD, **AS_IT_IS | {"outer_lr": 0.5}),
    "copying": partial(AsyncLocalSGD, **AS_IT_IS | {"outer_lr": 0.5}),
    "mortal": HybridAsync,
}

OPTIMIZERS: dict[str, Any] = {"half": torch.optim.SGD, "copying": Anchored}


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))
    given = inputs.to(next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(given).float(), inputs.sum(1, keepdim=True).sin())


def whole(model: nn.Module) -> Tensor:
    parts = [each for each in model.parameters() if isinstance(each, DTensor)]
    return torch.cat([part.full_tensor().detach().float().flatten() for part in parts])


def main(method: str, precision: str, out: str) -> None:
    if method != "plain":
        enter_island(None if RANKS in os.environ else 2)
    distributed.init_process_group("gloo")
    model = net().bfloat16() if precision == "bf16" else net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "policy" else MixedPrecisionPolicy()
    for module in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(module, mp_policy=policy)
    optimizer = OPTIMIZERS.get(method, torch.optim.AdamW)(model.parameters(), lr=0.01)
    found, rank = {}, distributed.get_rank()
    make = METHODS.get(method, lambda *_, **__: nullcontext())
    with make(model, optimizer, total_steps=STEPS, run_dir=f"{out}.run") as worker:
        rank = rank if worker is None else worker.rank
        for step in range(STEPS):
            if worker is not None and worker.finished:
                break
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            with torch.no_grad():
                loss_of(model, step, rank)  # which leaves whole parameters behind
            died = Path(f"{out}.died")
            if method == "mortal" and rank == 3 and step == 4 and not died.exists():
                died.touch()
                os._exit(9)
            if worker is not None and step == STEPS // 2 and worker.worker == 0:
                with worker.server_parameters():
                    loss_of(model, step, rank)
                    found["server"] = whole(model)
                    assert worker.state_dict()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    torch.save(found | {"model": whole(model)}, f"{out}-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
