"""AdaScale with 1, 4 and 16 single batches in a step, and linear scaling with warm-up of the same length.

Momentum-SGD with a cosine schedule, all settings those of one batch in a step. Accumulation stands in for ranks. Linear
scaling takes as many iterations as AdaScale did, with the learning rate times the batches in a step, which is warmed up
over a tenth of them and then follows the same cosine.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.collective import AdaScale  # noqa: E402
from scripts.bench.byte_model import ByteModel, Bytes  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LIMIT = 1.02  # of the loss with one batch in a step
MOMENTUM = 0.9
LR = (0.03, 0.1, 0.3)


def rate(lr: float, done: float) -> float:
    """A warm-up over a twentieth, then a cosine; ``done`` is the part of the run."""
    return lr * min(1.0, done * 20 + 1e-3) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def scaled(text: Bytes, lr: float, batches: int, steps: int, seed: int) -> tuple[float, int]:
    """Validation loss after ``steps`` scale-invariant steps, and iterations."""
    model = ByteModel(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    adascale = AdaScale(optimizer, scale=batches, accumulation=batches)
    while adascale.scale_invariant_steps < steps:
        optimizer.param_groups[0]["lr"] = rate(lr, int(adascale.scale_invariant_steps) / steps)
        for number in range(adascale.steps * batches, (adascale.steps + 1) * batches):
            (model(text.batch(number, seed)) / batches).backward()
        adascale.step()
        adascale.zero_grad()
    return text.score(model), adascale.steps


def linear(text: Bytes, lr: float, batches: int, iterations: int, seed: int) -> float:
    """Validation loss."""
    model = ByteModel(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    for step in range(iterations):
        done = step / iterations
        optimizer.param_groups[0]["lr"] = batches * min(1.0, 10 * done + 1e-3) * rate(lr, max(done, 0.05))
        optimizer.zero_grad()
        for number in range(step * batches, (step + 1) * batches):
            (model(text.batch(number, seed)) / batches).backward()
        optimizer.step()
    return text.score(model)


def main(
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="C4's shards; else a made-up text.")] = None,
    out: Annotated[Path, typer.Option(help="For the made-up text.")] = Path("runs/bench"),
    steps: Annotated[int, typer.Option(min=100, help="Of the run with one batch in a step.")] = 1200,
    batches: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated. [default: 4, 16]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other parameters and batches.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare AdaScale with one batch in a step; exit code 1 if a loss is more than 2% above."""
    torch.set_num_threads(1)
    report, text, every = Report(f"AdaScale, {steps} scale-invariant steps"), Bytes(data, out), range(1, seeds + 1)
    lr = min(LR, key=lambda each: _finite(scaled(text, each, 1, steps, 1)[0]))
    single = mean(scaled(text, lr, 1, steps, seed)[0] for seed in every)
    rows = [
        {"batches": 1, "iterations": float(steps), "AdaScale": single, "of one batch": 1.0, "linear scaling": single}
    ]
    for count in batches or [4, 16]:
        losses, iterations = zip(*(scaled(text, lr, count, steps, seed) for seed in every), strict=True)
        length = round(mean(iterations))
        other = mean(_finite(linear(text, lr, count, length, seed)) for seed in every)
        rows.append(_row(count, mean(iterations), mean(losses), single, other))
        report.bound(f"{count} batches: loss of that with one", mean(losses) / single, LIMIT)
    report.table(f"momentum {MOMENTUM}, learning rate {lr:g}; nats per byte, mean of {seeds} runs", rows)
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
