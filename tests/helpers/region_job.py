"""A script of a user's own: ``region_job.py RUN_DIR TOKEN_FILE UPSTREAM STEPS`` is one worker of a region."""

import sys
import time

import torch
from torch.nn import Linear
from torch.optim import SGD

from fairseq_async.pytorch import AsyncLocalSGD


def main() -> None:
    run_dir, token_file, upstream, steps = sys.argv[1:]
    torch.manual_seed(0)
    model = Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.05)
    own = {"run_dir": run_dir, "token_file": token_file, "upstream": upstream, "total_steps": int(steps)}
    with AsyncLocalSGD(model, optimizer, local_steps=2, snapshot_seconds=1e-3, **own) as training:
        generator = torch.Generator().manual_seed(training.worker)
        while not training.finished:
            samples = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            (model(samples) - samples.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)


if __name__ == "__main__":
    main()
