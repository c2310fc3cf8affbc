"""Trains the demo's model with accelerate's LocalSGD and with ours; one of two workers takes four times as long.

``python scripts/bench/beside_accelerate.py`` runs both by torchrun for the same seconds, and prints the batches of both
workers and the loss on text that neither has seen. A batch takes 0.05 s, on the slow worker 0.2 s, by sleeping, so that
other load on the machine matters little.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_async.cli.demo_training import BATCH, CONTEXT, CharacterModel  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402

LOCAL_STEPS, SECONDS_PER_BATCH, LR = 10, (0.05, 0.2), 3e-3


def texts() -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on, and those of the last tenth."""
    files = sorted((ROOT / "fairseq_async").rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    border = len(data) * 9 // 10
    return data[:border], data[border:]


def draw(data: Tensor, random: torch.Generator, count: int = BATCH) -> Tensor:
    return data[torch.randint(len(data) - CONTEXT, (count, 1), generator=random) + torch.arange(CONTEXT + 1)]


def one_batch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, rank: int) -> None:
    """One step, which takes as long as this worker's batches are to take."""
    until = time.monotonic() + SECONDS_PER_BATCH[rank]
    optimizer.zero_grad()
    model(batch).backward()
    time.sleep(max(0.0, until - time.monotonic()))
    optimizer.step()


def accelerate_worker(seconds: float) -> tuple[int, int, float]:
    from accelerate import Accelerator  # only this side needs it
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model, rank = CharacterModel(), accelerator.process_index
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
    data, held_out = texts()
    random, batches, more = torch.Generator().manual_seed(rank), 0, torch.ones(1)
    begin = time.monotonic()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_STEPS) as local:
        while more:
            one_batch(model, optimizer, draw(data, random), rank)
            local.step()
            batches += 1
            if batches % LOCAL_STEPS == 0:  # all stop at the same batch, or the next averaging would wait for ever
                more = accelerator.reduce(torch.tensor(float(time.monotonic() - begin < seconds)), "sum")
    return rank, batches, held_out_loss(accelerator.unwrap_model(model), held_out)


def our_worker(seconds: float) -> tuple[int, int, float]:
    from fairseq_async.torch import AsyncLocalSGD

    torch.manual_seed(0)
    model, (data, held_out), batches = CharacterModel(), texts(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with AsyncLocalSGD(model, optimizer, local_steps=LOCAL_STEPS, run_dir="async") as worker:
        random, begin = torch.Generator().manual_seed(worker.worker), time.monotonic()
        while time.monotonic() - begin < seconds:
            one_batch(model, optimizer, draw(data, random), worker.worker)
            batches += 1
    return worker.worker, batches, held_out_loss(model, held_out)


def held_out_loss(model: torch.nn.Module, held_out: Tensor) -> float:
    """Returns the loss in nats a byte of the run's last parameters, which both workers have."""
    with torch.no_grad():
        return float(model(draw(held_out, torch.Generator().manual_seed(9), 512)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--worker", choices=("accelerate", "fairseq-async"))
    given = parser.parse_args()
    if given.worker:
        rank, batches, loss = (accelerate_worker if given.worker == "accelerate" else our_worker)(given.seconds)
        Path(f"{rank}.json").write_text(json.dumps([batches, loss]))
        return
    for name in ("accelerate", "fairseq-async"):
        with tempfile.TemporaryDirectory() as folder:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            line = [*launcher, "--master-port", str(free_port()), __file__, "--worker", name]
            subprocess.run([*line, "--seconds", str(given.seconds)], cwd=folder, check=True, stderr=subprocess.DEVNULL)
            (fast, loss), (slow, _) = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1))
        print(f"{name}: {fast} + {slow} batches, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
