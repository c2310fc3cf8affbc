"""AdaScale with 1, 4 and 16 single batches in a step, and linear scaling with warm-up of the same length.

A cosine schedule, all settings those of one batch in a step. Accumulation stands in for ranks. Linear scaling makes as
many iterations as AdaScale did, with the learning rate times the batches in a step, which is warmed up over a tenth of
them and then follows the same cosine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.collective import AdaScale  # noqa: E402
from scripts.bench.batches import Batches, Name  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LIMIT = 1.02  # of the loss with one batch in a step


class Optimizer(str, Enum):
    """The optimizer that AdaScale wraps."""

    SGD = "sgd"
    ADAM = "adam"


_MAKE: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
    Optimizer.ADAM: lambda parameters: torch.optim.Adam(parameters, lr=1.0, betas=(0.9, 0.98)),
}
_RATES = {Optimizer.SGD: (0.03, 0.1, 0.3), Optimizer.ADAM: (0.001, 0.003, 0.01)}


def rate(lr: float, done: float) -> float:
    """A warm-up over a twentieth, then a cosine; ``done`` is the part of the run."""
    return lr * min(1.0, done * 20 + 1e-3) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@dataclass
class Claim:
    """Runs of one problem by one optimizer.

    Attributes:
        steps: of the run with one batch in a step.
    """

    batches: Batches
    optimizer: Optimizer
    lr: float
    steps: int

    def pretrain(self, steps: int) -> None:
        """Lets every run start from the parameters after so many steps of one batch, which no run uses again."""
        optimizer = _MAKE[self.optimizer](self.batches.fresh().parameters())
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = self.lr * min(1.0, 20 * step / steps)
            optimizer.zero_grad()
            self._accumulate(-1 - step, 1)
            optimizer.step()
        self.batches.start_here()

    def scaled(self, count: int) -> tuple[float, int]:
        """Validation loss after so many scale-invariant steps, and iterations."""
        optimizer = _MAKE[self.optimizer](self.batches.fresh().parameters())
        adascale = AdaScale(optimizer, scale=count, accumulation=count)
        while adascale.scale_invariant_steps < self.steps:
            optimizer.param_groups[0]["lr"] = rate(self.lr, int(adascale.scale_invariant_steps) / self.steps)
            if not self._accumulate(adascale.steps, count):
                break
            adascale.step()
            adascale.zero_grad()
        adascale.close()
        return self.batches.score(), adascale.steps

    def linear(self, count: int, iterations: int) -> float:
        """Validation loss."""
        optimizer = _MAKE[self.optimizer](self.batches.fresh().parameters())
        for step in range(iterations):
            done = step / iterations
            optimizer.param_groups[0]["lr"] = count * min(1.0, 10 * done + 1e-3) * rate(self.lr, max(done, 0.05))
            optimizer.zero_grad()
            if not self._accumulate(step, count):
                break
            optimizer.step()
        return self.batches.score()

    def _accumulate(self, step: int, count: int) -> bool:
        """The mean gradient of the step's batches; False where the run has diverged."""
        for number in range(step * count, (step + 1) * count):
            loss = self.batches.loss(number) / count
            if not math.isfinite(float(loss.detach())):
                return False
            loss.backward()
        return True


def main(
    problem: Annotated[Name, typer.Option(help="bytes, C4's tiny model, or Multi30k's small one.")] = Name.BYTES,
    optimizer: Annotated[Optimizer, typer.Option()] = Optimizer.SGD,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="C4's shards, else a made-up text; or Multi30k, binarised.")
    ] = None,
    lr: Annotated[list[float] | None, typer.Option(help="To choose from; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=100, help="Of the run with one batch in a step.")] = 1200,
    tokens: Annotated[int | None, typer.Option(min=64, help="In a single batch: the fewer, the more noise.")] = None,
    batches: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated. [default: 4, 16]")] = None,
    pretraining: Annotated[
        int, typer.Option(min=0, help="Steps of one batch, at the first learning rate, before all runs.")
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other parameters and batches.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare AdaScale with one batch in a step; exit code 1 if a loss is more than 2% above."""
    torch.set_num_threads(1)
    report = Report(f"AdaScale, {problem.value}, {optimizer.value}, {steps} scale-invariant steps")
    each_seed = [Batches(problem, data, seed, tokens) for seed in range(1, seeds + 1)]
    rates = lr or _RATES[optimizer]
    for batches_ in each_seed:
        Claim(batches_, optimizer, rates[0], steps).pretrain(pretraining)
    tried = {
        each: mean(_finite(Claim(batches_, optimizer, each, steps).scaled(1)[0]) for batches_ in each_seed)
        for each in rates
    }
    report.table("one batch in a step", [{f"learning rate {each:g}": loss for each, loss in tried.items()}])
    best = min(tried, key=lambda each: tried[each])
    claims, single = [Claim(each, optimizer, best, steps) for each in each_seed], tried[best]
    rows = [_row(1, steps, single, single, single)]
    for count in batches or [4, 16]:
        losses, iterations = zip(*(claim.scaled(count) for claim in claims), strict=True)
        scaled, length = mean(map(_finite, losses)), mean(iterations)
        other = mean(_finite(claim.linear(count, round(length))) for claim in claims)
        rows.append(_row(count, length, scaled, single, other))
        report.bound(f"{count} batches: loss of that with one", scaled / single, LIMIT)
    report.table(f"learning rate {best:g}; nats per token, mean of {seeds} runs", rows)
    last = rows[-1]
    report.bound(
        "linear scaling's loss of AdaScale's, largest batch", last["linear scaling"] / last["AdaScale"], 1.0, True
    )
    report.end(json)


def _row(batches: int, iterations: float, loss: float, single: float, linear: float) -> dict[str, float]:
    of_one = {"AdaScale": loss, "of one batch": loss / single}
    return {"batches": batches, "iterations": float(iterations)} | of_one | {"linear scaling": linear}


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


if __name__ == "__main__":
    typer.run(main)
