"""A worker for islands.py: ``islands_worker.py OUT LAYERS DTYPE STEPS``, under ``fairseq-async launch``.

Each layer is a matrix of 1024 x 1024. Rank 0 writes the memory of its process after the last step to OUT/memory.json.
"""

import gc
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.torch import HybridAsync, enter_island
from scripts.bench.memory import Memory

WIDTH = 1024
PAUSE = 0.1  # seconds after each step, in which the server finishes its own work


def main(out: str, layers: str, dtype: str, steps: str) -> None:
    """Train on random numbers."""
    enter_island()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    kind, ranks, rank = getattr(torch, dtype), distributed.get_world_size(), distributed.get_rank()
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(int(layers)))).to(kind)
    if ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    with HybridAsync(model, optimizer, total_steps=int(steps), run_dir=out):
        for _ in range(int(steps)):
            optimizer.zero_grad()
            model(torch.randn(2, WIDTH, dtype=kind)).float().square().mean().backward()
            optimizer.step()
            time.sleep(PAUSE)
        if rank == 0:
            Path(out, "memory.json").write_text(json.dumps(asdict(Memory.of(os.getpid()))))
    del model, optimizer  # torch aborts at exit with a live one in about one of five runs
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
