"""What DeepSpeed would leave in /dev/shm: 66 MiB for each rank of each run on CPUs."""

import os
from pathlib import Path

import torch.distributed as dist


def unlink_buffer() -> None:
    """Removes the name of this rank's buffer, when all ranks of its world have opened it; the memory stays until they
    end, however they do. All ranks call it, after ``deepspeed.init_distributed``."""
    dist.barrier()
    get = os.environ.get
    world = f"{os.getuid()}_{get('MASTER_ADDR')}_{get('MASTER_PORT')}"
    (Path("/dev/shm") / f"deepspeed_allreduce_buffer_{world}_{dist.get_rank()}").unlink(missing_ok=True)
