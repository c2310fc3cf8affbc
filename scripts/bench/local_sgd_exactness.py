"""Checks delayed Nesterov with equal workers against DiLoCo and a float64 reference, and the paper's formulas."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import (  # noqa: E402
    BufferedNesterov,
    DelayedNesterov,
    NesterovMomentum,
    Rule,
    Update,
    local_steps,
    shard_probabilities,
)
from fairseq_async.server import ParameterServer  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

LR, MOMENTUM, WORKERS, ROUNDS, LOCAL_STEPS, INNER_LR, SIZE = 0.7, 0.9, 4, 10, 5, 0.05, 10_000
STEP_SECONDS = (0.58, 0.75, 1.51, 3.33)  # step times of the paper's very heterogeneous workers


def difference(targets: Tensor, start: Tensor) -> Tensor:
    """Returns a worker's pseudo-gradient: by descent on |θ − target|²/2 and a quartic, in the dtype of ``start``."""
    local = start.clone()
    for _ in range(LOCAL_STEPS):
        away = local - targets.to(local)
        local -= INNER_LR * (away + 0.1 * away**3)
    return start - local


def run(rule: Rule, targets: Tensor, start: Tensor) -> Tensor:
    """Runs equal workers whose updates arrive together, as with a barrier or a grace period."""
    server = ParameterServer(start.clone(), rule, holds=True)
    for number in range(ROUNDS):
        pulled = [server.pull(worker) for worker in range(WORKERS)]
        for worker, parameters in enumerate(pulled):
            delta = difference(targets[worker], parameters.values)
            server.push(Update(worker, number, parameters.version, float(LOCAL_STEPS), delta))
        server.complete_round()
    return server.parameters


def reference(targets: Tensor, start: Tensor) -> Tensor:
    """Returns the parameters after DiLoCo in float64, with torch's own SGD."""
    theta = torch.nn.Parameter(start.double())
    outer = torch.optim.SGD([theta], lr=LR, momentum=MOMENTUM, nesterov=True)
    for _ in range(ROUNDS):
        theta.grad = torch.stack([difference(target, theta.detach()) for target in targets]).mean(0)
        outer.step()
    return theta.detach()


def relative(left: Tensor, right: Tensor) -> float:
    """Returns the relative difference |left − right| / |right|, in L2 norms."""
    return float(torch.linalg.vector_norm(left.double() - right.double()) / torch.linalg.vector_norm(right.double()))


def overshoot() -> float:
    """Returns the relative error of naive Nesterov, after four equal arrivals, against the closed form.

    The closed form is −ε(4 + 4β + 3β² + 2β³ + β⁴)·δ.
    """
    rule, theta = NesterovMomentum(LR, MOMENTUM, WORKERS), torch.zeros(1)
    for number in range(4):
        rule.apply(theta, Update(number, 0, 0, 1.0, torch.full((1,), float(WORKERS))))
    b = MOMENTUM
    return abs(theta.item() / (-LR * (4 + 4 * b + 3 * b**2 + 2 * b**3 + b**4)) - 1)


def formulas() -> list[dict[str, Any]]:
    """Returns DyLU's local steps and the shard probabilities beside their formulas, for the paper's speeds."""
    speeds = {worker: 1 / seconds for worker, seconds in enumerate(STEP_SECONDS)}
    steps = local_steps(speeds, 50)
    used = [round(1000 * speed) for speed in speeds.values()]
    probabilities = shard_probabilities([1, 1, 1, 1], used)
    behind = [max(1 / 4 - n / sum(used), 0.0) for n in used]
    return [
        {
            "seconds a step": seconds,
            "local steps": steps[worker],
            "formula": math.floor(speeds[worker] / max(speeds.values()) * 50),
            "shard probability": float(probabilities[worker]),
            "its formula": behind[worker] / sum(behind),
        }
        for worker, seconds in enumerate(STEP_SECONDS)
    ]


def main(json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None) -> None:
    """Compare; exit code 1 if a bound is broken."""
    report = Report(f"Local SGD, exactness: {WORKERS} workers, {ROUNDS} rounds, {SIZE:,} parameters")
    generator = torch.Generator().manual_seed(0)
    start, targets = torch.randn(SIZE, generator=generator), torch.randn(WORKERS, SIZE, generator=generator)
    expected = reference(targets, start)
    delayed = run(DelayedNesterov(LR, MOMENTUM, WORKERS), targets, start)
    diloco = run(BufferedNesterov(LR, MOMENTUM, WORKERS), targets, start)
    report.bound("delayed Nesterov and the reference", relative(delayed, expected), 1e-6)
    report.bound("DiLoCo and the reference", relative(diloco, expected), 1e-6)
    report.bound("delayed Nesterov and DiLoCo", relative(delayed, diloco), 1e-6)
    report.bound("naive Nesterov and the closed form", overshoot(), 1e-6)
    rows = formulas()
    report.table("workers as fast as the paper's", rows)
    report.bound("local steps off", sum(abs(row["local steps"] - row["formula"]) for row in rows), 0)
    report.bound("probabilities off", max(abs(row["shard probability"] - row["its formula"]) for row in rows), 1e-9)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
