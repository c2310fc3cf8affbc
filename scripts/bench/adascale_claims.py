"""Checks AdaScale's claims on a small language model: loss, gain, batches that change in a run, and smoothing.

All settings are fixed before the runs, by the constants below. Accumulation stands in for ranks. Every rule has the
same schedule, as a function of the share of the run that is done. Linear scaling and the square-root rule make as many
iterations as AdaScale did with the same seed. Results of runs are kept, and these are not run again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import run_main  # noqa: E402
from scripts.bench.adascale_runs import POINTS, Optimizer, Outcome, Rule, Run, outcome  # noqa: E402
from scripts.bench.batches import Batches, Name  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

STEPS = 2000  # steps of the run with one batch in a step
TOKENS = 64  # bytes in a single batch
SEEDS = (1, 2, 3)  # seeds of parameters and batches
RATES = {Optimizer.SGD: (0.01, 0.03, 0.1, 0.3), Optimizer.ADAM: (0.001, 0.003, 0.01, 0.03)}
LIMIT = 0.02  # how far the loss may be from that with one batch, on either side
FEW, MANY, CHANGING = (4,), (16,), (1, 4, 16, 4)  # batches in a step
REFERENCE = 256  # batches from which the reference gain is computed
SMOOTHINGS = {"none, 0": 0.0, "the paper's, 1 − S/1000": None, "longer, 1 − S/10,000": 1 - MANY[0] / 10_000}


class Bench:
    """Runs the runs that have no kept result.

    Args:
        data: directory with shards of text, or None for the made-up text.
        out: directory of the kept results, all of the same text and the same constants.
    """

    def __init__(self, data: Path | None, out: Path, steps: int = STEPS, processes: int = 1) -> None:
        self.data, self.steps = data, steps
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        self._done = Kept(out / "runs.jsonl", Outcome)

    def outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
        """Returns the outcomes in the order of the runs."""
        running = {self._pool.submit(_run, run, self.data): run for run in runs if run.key not in self._done}
        for finished in as_completed(running):
            self._keep(running[finished], finished.result())
        return [self._done[run.key] for run in runs]

    def seeds(self, optimizer: Optimizer, lr: float, **values: Any) -> list[Outcome]:
        """Returns the outcomes of the same run with each seed."""
        return self.outcomes(self.runs(optimizer, lr, **values))

    def runs(self, optimizer: Optimizer, lr: float, **values: Any) -> list[Run]:
        return [Run(optimizer, lr, seed, self.steps, **values) for seed in SEEDS]

    def close(self) -> None:
        """Ends the pool's processes."""
        self._pool.shutdown()

    def _keep(self, run: Run, found: Outcome) -> None:
        self._done.keep(run.key, found)
        print(f"{run.key}: {found.loss:.4g} after {found.iterations} iterations", file=sys.stderr, flush=True)


def _run(run: Run, data: Path | None) -> Outcome:
    torch.set_num_threads(1)
    return outcome(run, _batches(data, run.seed))


@cache
def _batches(data: Path | None, seed: int) -> Batches:
    return Batches(Name.BYTES, data, seed, TOKENS)


def best_rate(bench: Bench, report: Report, optimizer: Optimizer) -> float:
    """Returns the grid's learning rate with the least mean loss of one batch in a step; at an edge, breaks a bound."""
    grid = RATES[optimizer]
    bench.outcomes([run for lr in grid for run in bench.runs(optimizer, lr)])  # all at once
    found = [mean_and_error([each.loss for each in bench.seeds(optimizer, lr)], "loss") for lr in grid]
    report.table(
        f"{optimizer.value}, one batch in a step",
        [{"learning rate": lr} | loss for lr, loss in zip(grid, found, strict=True)],
    )
    place = min(range(len(grid)), key=lambda each: found[each]["loss"])
    inside = min(place, len(grid) - 1 - place)
    report.bound(f"{optimizer.value}: places between the best learning rate and the grid's edge", inside, 1, True)
    return grid[place]


def compare(bench: Bench, report: Report, optimizer: Optimizer, lr: float) -> None:
    """Compares AdaScale, linear scaling and the square-root rule with one batch in a step."""
    single = bench.seeds(optimizer, lr)
    rows = [row({"batches": "1", "rule": ""}, single, single)]
    kinds = {batches: bench.runs(optimizer, lr, batches=batches) for batches in (FEW, MANY, CHANGING)}
    kinds[MANY] = [replace(run, reference=REFERENCE) for run in kinds[MANY]]
    bench.outcomes([run for runs in kinds.values() for run in runs])  # all at once
    others = [run for batches in (FEW, MANY) for rule in Rule for run in as_many(bench, kinds[batches], rule)]
    bench.outcomes(others)
    for batches, runs in kinds.items():
        for rule in [Rule.ADASCALE] if batches is CHANGING else Rule:
            found = bench.outcomes(as_many(bench, runs, rule))
            rows.append(row({"batches": ", ".join(map(str, batches)), "rule": rule.value}, found, single))
    report.table(f"{optimizer.value}, learning rate {lr:g}: loss in nats per byte, mean of {len(SEEDS)} runs", rows)
    for each in rows:
        if each["rule"] == Rule.ADASCALE.value:
            keep_to_limit(report, f"{optimizer.value}, {each['batches']} batches", each["of one batch"])
    report.table(f"{optimizer.value}, {MANY[0]} batches: gain", gain_rows(bench.outcomes(kinds[MANY])))


def as_many(bench: Bench, runs: Sequence[Run], rule: Rule) -> list[Run]:
    """Returns these runs of AdaScale with another rule and as many iterations."""
    if rule is Rule.ADASCALE:
        return list(runs)
    found = zip(runs, bench.outcomes(runs), strict=True)
    return [replace(run, rule=rule, iterations=each.iterations, reference=0) for run, each in found]


def keep_to_limit(report: Report, what: str, ratio: float) -> None:
    """Checks that the loss is near that of one batch; a loss that is too low misses the claim, too."""
    side = "above" if ratio > 1 else "below"
    report.bound(f"{what}: loss {side} that of one batch, as a share of it", abs(ratio - 1), LIMIT)


def compare_smoothing(bench: Bench, report: Report, optimizer: Optimizer, lr: float) -> None:
    """Compares values of θ, the smoothing of the averages, with the largest number of batches."""
    single, rows = bench.seeds(optimizer, lr), []
    for name, smoothing in SMOOTHINGS.items():
        reference = REFERENCE if smoothing is None else 0  # so that this run is the one of `compare`, which is kept
        found = bench.seeds(optimizer, lr, batches=MANY, smoothing=smoothing, reference=reference)
        rows.append(row({"θ": name}, found, single))
    report.table(f"{optimizer.value}, {MANY[0]} batches: smoothing", rows)


def row(names: dict[str, str], found: Sequence[Outcome], single: Sequence[Outcome]) -> dict[str, Any]:
    """Returns a row of means and standard errors; each ratio is of two runs with the same seed."""
    ratios = [each.loss / one.loss for each, one in zip(found, single, strict=True)]
    iterations = mean_and_error([float(each.iterations) for each in found], "iterations")
    losses = mean_and_error([each.loss for each in found], "loss")
    return names | iterations | losses | mean_and_error(ratios, "of one batch")


def gain_rows(found: Sequence[Outcome]) -> list[dict[str, float]]:
    """Compares the gain of the next step with that of many batches, at each point that a run has reached."""
    rows = []
    for place, done in enumerate(POINTS):
        pairs = [each.gains[place] for each in found if len(each.gains) > place]
        if pairs:
            own, reference = zip(*pairs, strict=True)
            differences = [gain / other - 1 for gain, other in pairs]
            means = mean_and_error(own, "gain") | mean_and_error(reference, f"of {REFERENCE} batches")
            rows.append({"part of the run": done} | means | mean_and_error(differences, "relative difference"))
    return rows


def mean_and_error(values: Sequence[float], name: str) -> dict[str, float]:
    """Returns the mean, infinite if a run diverged, and its standard error."""
    finite = all(map(math.isfinite, values))
    error = stdev(values) / math.sqrt(len(values)) if finite and len(values) > 1 else math.nan
    return {name: fmean(values) if finite else math.inf, f"± {name}": error}


def main(
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Shards of text, else a made-up one.")] = None,
    steps: Annotated[int, typer.Option(min=20, help="Of the run with one batch in a step.")] = STEPS,
    optimizer: Annotated[list[Optimizer] | None, typer.Option(help="May be repeated. [default: both]")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/adascale_claims"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare AdaScale with one batch in a step; exit code 1 if a loss is more than 2% from it, on either side."""
    report, bench = Report(f"AdaScale, {steps} scale-invariant steps"), Bench(data, out, steps, processes)
    for each in optimizer or list(Optimizer):
        lr = best_rate(bench, report, each)
        compare(bench, report, each, lr)
        if each is Optimizer.SGD:
            compare_smoothing(bench, report, each, lr)
    bench.close()
    report.end(json)


if __name__ == "__main__":
    run_main(main)
