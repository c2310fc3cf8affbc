"""Times steps whose micro-batches are divided by the workers' speeds, on simulated machines and without gradients.

Beside equal shares behind a barrier, which is synchronous training, and beside the time in which workers that never
wait would compute as many micro-batches. A bound that is missed is shown, and the program ends with code 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.method.spec import JsonObject  # noqa: E402
from fairseq_async.protocol import Receipt  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.staleness import NoGradients  # noqa: E402

CLUSTERS = {
    "1, 3": (1.0, 3.0),
    "1, 1, 1, 2": (1.0, 1.0, 1.0, 2.0),
    "1, 1, 2, 4": (1.0, 1.0, 2.0, 4.0),
    "1.03, 1.03, 2.05, 4.1": (
        1.03,
        1.03,
        2.05,
        4.1,
    ),  # nearly the same, as real processes are
    "14 of 1, 2 of 4": (1.0,) * 14 + (4.0,) * 2,
}
BOUNDS = {("1, 3", 0.0): 0.55, ("1, 1, 2, 4", 0.0): 0.42, ("1, 3", 0.3): 0.58, ("1, 1, 2, 4", 0.3): 0.48}
METHODS: dict[str, dict[str, Any]] = {"synchronous": {"barrier": True}, "shares": {"shares": "auto"}}
METHODS["shares, barrier"] = METHODS["synchronous"] | METHODS["shares"]
SHARED = "shares, barrier", "shares"
STEPS, SLOWER_FROM, AFTERWARDS = 200, 100, 15
Arrivals = list[tuple[float, Receipt, int]]


def arrivals(seconds: Sequence[Any], method: dict[str, Any], micro_batches: int, seed: int, folder: Path) -> Arrivals:
    """Returns time, receipt and number of micro-batches of each gradient of a run of :data:`STEPS` steps."""
    given = {
        "problem": {"type": "gaussians", "samples": 64, "hidden": 1},
        "steps": STEPS * micro_batches,
        "batch_size": 1,
        "optimizer": {"type": "sgd", "lr": 0.1},
        "seed": seed,
        "cluster": {"workers": len(seconds), "seconds_per_step": list(seconds)},
        "methods": {"it": {"method": "hybrid_async", "micro_batches": micro_batches, **method}},
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(given))
    experiment = experiments.read(path)
    problem = problems.build(experiment.head.problem, folder, seed, torch.device("cpu"))
    model = NoGradients(problem, 1, ShardOrder(shard_sizes(64, len(seconds)), seed), seed)
    found: Arrivals = []

    def write(time: float, receipt: Receipt, report: protocol.Report, extra: JsonObject) -> None:
        found.append((time, receipt, report.micro_batches or micro_batches))

    (cluster,) = experiment.clusters.values()
    trial = Trial(experiment, experiment.methods[0], cluster, model, model.flat.clone(), write)
    while trial.advance():
        pass
    return found


def noisy(seconds: float, noise: float) -> Any:
    return {"distribution": "lognormal", "mean": seconds, "spread": noise} if noise else seconds


def row(cluster: str, noise: float, micro_batches: int, seeds: int, folder: Path) -> dict[str, Any]:
    """Returns each method's time as a share of the synchronous run's, with the staleness of its gradients."""
    seconds, times, stale = CLUSTERS[cluster], dict[str, float](), dict[str, float]()
    for name, method in METHODS.items():
        runs = [
            arrivals([noisy(each, noise) for each in seconds], method, micro_batches, seed, folder)
            for seed in range(1, seeds + 1)
        ]
        times[name] = fmean(run[-1][0] for run in runs)
        stale[name] = fmean(receipt.staleness for run in runs for _, receipt, _ in run)
    free = STEPS * micro_batches * len(seconds) / sum(1 / each for each in seconds)
    return {
        "seconds a micro-batch": cluster,
        "noise": f"{noise:.0%}",
        "U": micro_batches,
        **{name: times[name] / times["synchronous"] for name in SHARED},
        "free": free / times["synchronous"],
        "staleness of shares": stale["shares"],
    }


def slower(method: dict[str, Any], micro_batches: int, folder: Path) -> list[tuple[float, int]]:
    """Returns seconds and micro-batches of each step, from the one on in which one of two equal workers becomes four
    times slower."""
    trace = folder / f"slower_{micro_batches}.txt"  # a trace is read once
    trace.write_text("1\n" * SLOWER_FROM * micro_batches + "4\n" * 2 * STEPS * micro_batches)
    numbers: Counter[float] = Counter()  # at the end of each step
    for time, _, number in arrivals([1.0, {"trace": str(trace)}], method, micro_batches, 1, folder):
        numbers[time] += number
    ends = list(numbers)[SLOWER_FROM - 1 : SLOWER_FROM + AFTERWARDS]
    return [(end - before, numbers[end]) for before, end in zip(ends, ends[1:], strict=False)]


def after_five(steps: Sequence[tuple[float, int]], micro_batches: int) -> list[tuple[float, int]]:
    """Returns the steps after the first ones, which together have the micro-batches of five whole steps."""
    done = accumulate(number for _, number in steps)
    return [step for step, number in zip(steps, done, strict=True) if number > 5 * 2 * micro_batches]


def of_free_rate(steps: Sequence[tuple[float, int]]) -> float:
    """Returns the micro-batches a second of these steps, over those of workers of 1 and 4 seconds that never wait."""
    return sum(number for _, number in steps) / sum(seconds for seconds, _ in steps) / (1 + 1 / 4)


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print the time of each cluster, and of the steps after a worker has become four times slower."""
    report = Report("shares by speed")
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = [row(c, noise, u, seeds, folder) for c in CLUSTERS for noise in (0.0, 0.1, 0.3) for u in (2, 4, 8)]
        report.table("time as a share of the synchronous run's", found)
        after = {(name, u): slower(METHODS[name], u, folder) for name in SHARED for u in (4, 8, 16)}
    rows: list[dict[str, Any]] = [
        {"method": name, "U": u}
        | {str(number): round(of_free_rate([step]), 3) for number, step in enumerate(steps, 1)}
        | {"after five steps": of_free_rate(after_five(steps, u))}
        for (name, u), steps in after.items()
    ]
    report.table("a worker becomes four times slower: rate of each step, of the free one", rows)
    for (cluster, noise), bound in BOUNDS.items():
        (of_it,) = [
            r for r in found if (r["seconds a micro-batch"], r["noise"], r["U"]) == (cluster, f"{noise:.0%}", 4)
        ]
        report.bound(f"{cluster}, noise {noise:.0%}, U = 4, barrier", of_it["shares, barrier"], bound)
        report.bound(f"{cluster}, noise {noise:.0%}, U = 4", of_it["shares"], bound)
    for row_of_it in rows:
        what = f"four times slower, {row_of_it['method']}, U = {row_of_it['U']}: rate after five steps, of the free one"
        report.bound(what, row_of_it["after five steps"], 0.95, True)
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
