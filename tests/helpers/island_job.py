"""A loop in plain PyTorch whose workers are islands: ``island_job.py METHOD OUT``, of two ranks each under torchrun.

Each rank leaves its parameters in OUT-RANK.pt, those of all ranks and those of the server beside each other.
"""

import gc
import os
import sys
from functools import partial

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.environment import RANKS
from fairseq_async.torch import AsyncLocalSGD, HybridAsync, enter_island
from fairseq_async.worker.start.world import entered_world
from tests.helpers.plain_loop import AS_IT_IS, STEPS, backward, flat, net

METHODS = {
    "hybrid": partial(HybridAsync, barrier=True),
    "local": partial(AsyncLocalSGD, **AS_IT_IS, buffers="average"),
    "diloco": partial(
        AsyncLocalSGD, outer="diloco", outer_lr=1.0, outer_momentum=0.0, local_steps=3, buffers="average"
    ),
}


def world_of(launched: bool) -> int:
    """The rank among all; the launcher has started a worker of two and one of one."""
    worker = entered_world()
    assert worker is not None and worker.ranks == (3 if launched else int(os.environ["WORLD_SIZE"]) * worker.workers)
    assert distributed.get_world_size() == (1 if launched and worker.worker else 2)
    return worker.global_rank


def main(method: str, out: str) -> None:
    launched = RANKS in os.environ
    enter_island(None if launched else 2)
    distributed.init_process_group("gloo")
    found, rank = {}, world_of(launched)
    module = net()
    seen = distributed.get_rank() if method == "hybrid" else rank  # workers that exchange none must begin with the same
    module.register_buffer("seen", torch.full((3,), float(seen)))  # DistributedDataParallel gives all rank 0's
    model: nn.Module = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    training = METHODS[method](model, optimizer, scheduler=schedule, total_steps=STEPS, run_dir=f"{out}.run")
    with training as worker:
        assert worker.rank == rank and worker.worker == rank // 2
        flags = [False, distributed.get_rank() == 0, distributed.get_rank() == 1]
        of_any = [worker.async_worker.client.on_any_rank(flag) for flag in flags]
        assert of_any == [False, True, distributed.get_world_size() == 2], "one rank's flag is the worker's"
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step, rank)
            optimizer.step()
            if method == "hybrid":
                schedule.step()
            if step == STEPS // 2 and worker.worker == 0:  # all ranks of the worker
                before = flat(module)
                with worker.server_parameters():
                    found["servers"], found["seen"] = flat(module), module.seen.clone()
                    assert worker.state_dict()
                assert torch.equal(before, flat(module))
    torch.save(found | {"model": flat(module)}, f"{out}-{rank}.pt")
    del model, optimizer, schedule, training, worker  # torch aborts at exit with a live one in about one of five runs
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
