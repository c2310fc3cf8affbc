"""A worker of a run over a slow line: local SGD in plain PyTorch on C4, and the validation loss of each version.

    python scripts/bench/slow_line_worker.py JOB.json

The environment gives this worker's number and the server's address. Worker 0 keeps the server's parameters of each
round, scores them after the run, and writes a :class:`Curve`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.environment import WORKER  # noqa: E402
from fairseq_async.pytorch import AsyncLocalSGD  # noqa: E402
from recipes.c4_lm.simulated import C4  # noqa: E402

WORKERS = 2
BATCH, SEQUENCE, VALIDATION = 2, 64, 64  # sequences, tokens, sequences
WARMUP = 20  # local steps
LR = 3e-3


@dataclass(frozen=True)
class Job:
    """The settings that all workers of a run share.

    Attributes:
        data: directory of C4 shards.
        tokens: directory for the tokens of the text.
        out: directory of the run.
        options: arguments of :class:`AsyncLocalSGD`.
    """

    data: str
    tokens: str
    out: str
    seed: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """The validation losses of a run, as worker 0 has computed them.

    Attributes:
        started: time when all workers were ready, in seconds since 1970.
        parameters: number of the model's parameters.
        losses: each version with the validation loss of the server's parameters at it, in nats per token.
    """

    started: float
    parameters: int
    losses: list[tuple[int, float]]


def problem(data: str, tokens: str, seed: int) -> C4:
    """Returns the problem with the model and the text."""
    torch.manual_seed(seed)
    return C4(seed, torch.device("cpu"), Path(data), out=tokens, sequence=SEQUENCE, validation=VALIDATION)


def batches(c4: C4, own: range, seed: int) -> Iterator[Tensor]:
    """Yields batches of the worker's own sequences, drawn by the seed, so that they are the same in all runs."""
    draw = torch.Generator().manual_seed(1000 * seed + own.start)
    while True:
        yield c4.batch([own[int(at)] for at in torch.randint(len(own), (BATCH,), generator=draw)])


class Steps:
    """Takes local steps by AdamW, with a linear warm-up to a constant rate, and gradients clipped to norm 1."""

    def __init__(self, c4: C4) -> None:
        self.c4 = c4
        self.optimizer = AdamW(c4.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        self.steps_schedule = True  # not in a run, which steps it by its own progress
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    def take(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.c4.loss(batch)[0].backward()
        clip_grad_norm_(self.c4.model.parameters(), 1.0)
        self.optimizer.step()
        if self.steps_schedule:
            self.schedule.step()


def meet(out: Path, worker: int) -> float:
    """Waits until all workers have read their text, which is not part of the measured run; returns the time."""
    (out / f"ready-{worker}").touch()
    while not all((out / f"ready-{each}").exists() for each in range(WORKERS)):
        time.sleep(0.05)
    return time.time()


def train(job: Job, c4: C4, worker: int) -> tuple[float, list[tuple[int, Tensor]]]:
    """Trains; returns the time of the start, and in worker 0 the server's parameters then and after each round."""
    training, text = Steps(c4), batches(c4, range(worker, c4.samples, WORKERS), job.seed)
    kept = [(0, parameters_to_vector(c4.model.parameters()).detach())] if worker == 0 else []
    started = meet(Path(job.out), worker)
    training.steps_schedule = False
    with AsyncLocalSGD(c4.model, training.optimizer, training.schedule, **job.options) as run:
        while not run.finished:
            training.take(next(text))
            version = run.async_worker.version
            if worker == 0 and version > kept[-1][0]:  # the server waits for this worker, and stays at the version
                with run.server_parameters():
                    kept.append((version, parameters_to_vector(c4.model.parameters()).detach()))
    return started, kept


def main() -> None:
    torch.set_num_threads(1)
    job, worker = Job(**json.loads(Path(sys.argv[1]).read_text())), int(os.environ[WORKER])
    c4 = problem(job.data, job.tokens, job.seed)
    started, kept = train(job, c4, worker)
    losses = []
    for version, parameters in kept:
        vector_to_parameters(parameters, c4.model.parameters())
        losses.append((version, c4.evaluate()))
    if worker == 0:
        curve = Curve(started, kept[0][1].numel(), losses)
        (Path(job.out) / "curve.json").write_text(json.dumps(asdict(curve)))


if __name__ == "__main__":
    main()
