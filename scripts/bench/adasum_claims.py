"""Steps to a given validation loss: average, sum and Adasum of 4 and of 16 single batches, by SGD, Adam and LAMB.

Accumulation stands in for ranks. Averaging and Adasum have the learning rate of the run with one batch in a step, the
sum has that times the number of batches (linear scaling). Adasum has the gradient form for SGD and the delta form for
Adam and LAMB, where each rank has moments of its own.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import adasum  # noqa: E402
from fairseq_async.algorithms.lamb import Lamb  # noqa: E402
from scripts.bench.byte_model import ByteModel, Bytes, gradients  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LIMIT = 0.8  # Adasum's steps of averaging's, with LAMB
EVERY = 10  # steps between two scores
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "SGD": (lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), (0.03, 0.1, 0.3)),
    "Adam": (lambda params, lr: torch.optim.Adam(params, lr=lr, betas=(0.9, 0.98)), (1e-3, 3e-3, 1e-2)),
    "LAMB": (lambda params, lr: Lamb(params, lr=lr, betas=(0.9, 0.98)), (3e-3, 1e-2, 3e-2)),
}
METHODS = ("average", "sum", "Adasum")


class Run:
    """One training run.

    Args:
        batches: single batches in a step.
    """

    def __init__(self, text: Bytes, name: str, lr: float, method: str, batches: int, seed: int, warm_up: int) -> None:
        self.text, self.method, self.batches, self.seed, self.warm_up = text, method, batches, seed, warm_up
        self.model = ByteModel(seed)
        self.delta = method == "Adasum" and name != "SGD"
        self.replicas = [copy.deepcopy(self.model) for _ in range(batches)] if self.delta else [self.model]
        rate = lr * batches if method == "sum" else lr
        make = OPTIMIZERS[name][0]
        self.optimizers = [make(replica.parameters(), rate) for replica in self.replicas]
        self.rate, self.steps = rate, 0

    def step(self) -> None:
        """Linear warm-up, then a constant learning rate."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (self.steps + 1) / self.warm_up)
        numbers = range(self.steps * self.batches, (self.steps + 1) * self.batches)
        single = gradients(self.model, self.text, numbers, self.seed)
        combine = adasum if self.method == "Adasum" else _mean
        if self.delta:
            self._combine_steps(single)
        else:
            for parameter, *of_batches in zip(self.model.parameters(), *single, strict=True):
                parameter.grad = combine(of_batches)
            self.optimizers[0].step()
        self.steps += 1

    @torch.no_grad()
    def _combine_steps(self, single: list[list[Tensor]]) -> None:
        start = list(self.model.parameters())
        deltas = []
        for replica, optimizer, of_rank in zip(self.replicas, self.optimizers, single, strict=True):
            for own, parameter, gradient in zip(replica.parameters(), start, of_rank, strict=True):
                own.copy_(parameter)
                own.grad = gradient
            optimizer.step()
            deltas.append([own - parameter for own, parameter in zip(replica.parameters(), start, strict=True)])
        for parameter, *of_ranks in zip(start, *deltas, strict=True):
            parameter.add_(adasum(of_ranks))

    def train(self, steps: int, target: float = -math.inf) -> float:
        """Steps until the validation loss is at the target, between two scores; infinite if it is not after all."""
        before = self.text.score(self.model)
        while self.steps < steps:
            self.step()
            if self.steps % EVERY == 0:
                now = self.text.score(self.model)
                if now <= target:
                    return self.steps - EVERY * (target - now) / (before - now)
                if not math.isfinite(now):
                    break
                before = now
        return math.inf


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def tuned(text: Bytes, name: str, steps: int, warm_up: int, seed: int) -> tuple[float, float]:
    """The best learning rate for one batch in a step, and the loss that it comes to."""
    scores = []
    for lr in OPTIMIZERS[name][1]:
        run = Run(text, name, lr, "average", 1, seed, warm_up)
        run.train(steps)
        scores.append((text.score(run.model), lr))
    loss, lr = min(each for each in scores if math.isfinite(each[0]))
    return lr, loss


def main(
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="C4's shards; else a made-up text.")] = None,
    out: Annotated[Path, typer.Option(help="For the made-up text.")] = Path("runs/bench"),
    steps: Annotated[
        int, typer.Option(min=EVERY, help="Steps of the run with one batch, whose loss is the target.")
    ] = 400,
    batches: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated. [default: 4, 16]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other parameters and batches.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare average, sum and Adasum; exit code 1 if LAMB with Adasum does not save a fifth of the steps."""
    torch.set_num_threads(1)
    report, text, warm_up = Report(f"Steps to the loss of {steps} steps with one batch"), Bytes(data, out), steps // 20
    for name in OPTIMIZERS:
        lr, target = tuned(text, name, steps, warm_up, seed=1)
        rows: list[dict[str, Any]] = []
        for count in batches or [4, 16]:
            needed = {
                method: median(
                    Run(text, name, lr, method, count, seed, warm_up).train(steps, target)
                    for seed in range(1, seeds + 1)
                )
                for method in METHODS
            }
            ratio = needed["Adasum"] / needed["average"]
            rows.append({"batches": count, **needed, "Adasum of average": ratio})
            if name == "LAMB":
                report.bound(f"LAMB, {count} batches: Adasum's steps of averaging's", ratio, LIMIT)
        report.table(f"{name}, learning rate {lr:g}, to {target:.3f} nats per byte; median of {seeds} runs", rows)
    report.end(json)


if __name__ == "__main__":
    typer.run(main)
