"""Counts steps to a given validation loss with average, sum and Adasum of 4 and 16 batches; SGD, Adam and LAMB.

Accumulation stands in for ranks. Averaging and Adasum use the learning rate of the run with one batch in a step; the
sum uses that times the number of batches (linear scaling). Adasum has the gradient form for SGD and the delta form for
Adam and LAMB, where each rank has moments of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import adasum  # noqa: E402
from fairseq_async.algorithms.lamb import Lamb  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.batches import Batches, Name  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LIMIT = 0.8  # Adasum's steps as a share of averaging's, with LAMB
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
        count: number of single batches in a step.
    """

    def __init__(self, batches: Batches, name: str, lr: float, method: str, count: int, warm_up: int) -> None:
        self.batches, self.method, self.count, self.warm_up = batches, method, count, warm_up
        self.parameters: list[Tensor] = list(batches.fresh().parameters())
        self.delta = method == "Adasum" and name != "SGD"
        self.rate, self.steps = lr * count if method == "sum" else lr, 0
        # in the delta form each rank has an optimizer, and moments, of its own
        self.ranks = [[p.detach().clone() for p in self.parameters] for _ in range(count)] if self.delta else []
        self.optimizers = [OPTIMIZERS[name][0](own, self.rate) for own in self.ranks or [self.parameters]]

    def step(self) -> None:
        """Takes a step; the learning rate has a linear warm-up and then is constant."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (self.steps + 1) / self.warm_up)
        single = self.batches.gradients(range(self.steps * self.count, (self.steps + 1) * self.count))
        combine = adasum if self.method == "Adasum" else _mean
        if self.delta:
            self._combine_steps(single)
        else:
            for parameter, *of_batches in zip(self.parameters, *single, strict=True):
                parameter.grad = combine(of_batches)
            self.optimizers[0].step()
        self.steps += 1

    @torch.no_grad()
    def _combine_steps(self, single: list[list[Tensor]]) -> None:
        deltas = []
        for rank, optimizer, gradients in zip(self.ranks, self.optimizers, single, strict=True):
            for own, parameter, gradient in zip(rank, self.parameters, gradients, strict=True):
                own.copy_(parameter)
                own.grad = gradient
            optimizer.step()
            deltas.append([own - parameter for own, parameter in zip(rank, self.parameters, strict=True)])
        for parameter, *of_ranks in zip(self.parameters, *deltas, strict=True):
            parameter.add_(adasum(of_ranks))

    def train(self, steps: int, target: float = -math.inf) -> float:
        """Trains until the validation loss reaches the target; returns the number of steps, infinite if it does not.

        The number is interpolated between two scores.
        """
        before = self.batches.score()
        while self.steps < steps:
            self.step()
            if self.steps % EVERY == 0:
                now = self.batches.score()
                if now <= target:
                    return self.steps - EVERY * (target - now) / (before - now)
                if not math.isfinite(now):
                    break
                before = now
        return math.inf


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def tuned(batches: Batches, name: str, rates: Sequence[float], steps: int, warm_up: int) -> tuple[float, float]:
    """Returns the best learning rate for one batch in a step, and the loss that it reaches."""
    scores = []
    for lr in rates:
        Run(batches, name, lr, "average", 1, warm_up).train(steps)
        scores.append((batches.score(), lr))
        print(f"{name}, learning rate {lr:g}: {scores[-1][0]:.4f}", flush=True)
    loss, lr = min(each for each in scores if math.isfinite(each[0]))
    return lr, loss


def main(
    problem: Annotated[Name, typer.Option(help="bytes, C4's tiny model, or Multi30k's small one.")] = Name.BYTES,
    optimizer: Annotated[list[str] | None, typer.Option(help="May be repeated. [default: all]")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="C4's shards, else a made-up text; or Multi30k, binarised.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=EVERY, help="Steps of the run with one batch, whose loss is the target.")
    ] = 400,
    batches: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated. [default: 4, 16]")] = None,
    tokens: Annotated[int | None, typer.Option(min=64, help="In a single batch: the more, the less noise.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other parameters and batches.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare average, sum and Adasum; exit code 1 if LAMB with Adasum does not save a fifth of the steps."""
    torch.set_num_threads(1)
    names = optimizer or list(OPTIMIZERS)
    if unknown := [name for name in names if name not in OPTIMIZERS]:
        fail(ConfigurationError(f"--optimizer {unknown[0]}: there are {', '.join(OPTIMIZERS)}"))
    report, warm_up = Report(f"{problem.value}: steps to the loss of {steps} steps with one batch"), steps // 20
    each_seed = [Batches(problem, data, seed, tokens) for seed in range(1, seeds + 1)]
    for name in names:
        lr, target = tuned(each_seed[0], name, OPTIMIZERS[name][1], steps, warm_up)
        rows: list[dict[str, Any]] = []
        for count in batches or [4, 16]:
            needed = {
                method: median(Run(each, name, lr, method, count, warm_up).train(steps, target) for each in each_seed)
                for method in METHODS
            }
            ratio = needed["Adasum"] / needed["average"]
            rows.append({"batches": count, **needed, "Adasum of average": ratio})
            if name == "LAMB":
                report.bound(f"LAMB, {count} batches: Adasum's steps of averaging's", ratio, LIMIT)
        report.table(f"{name}, learning rate {lr:g}, to {target:.3f} nats per token; median of {seeds} runs", rows)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
