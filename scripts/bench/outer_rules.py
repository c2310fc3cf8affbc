"""Outer rules of local SGD, each at its own best outer learning rate, with the same scheduling for all.

Every method computes the same number of local steps from the same pretrained parameters, on the same data. Scheduling
is one of three for all asynchronous methods: none (what arrives at the same moment is applied together, so that equal
workers have staleness 0), a grace period, and a grace period with dynamic local steps. The outer learning rate of each
method, cluster and scheduling is the best of a grid, by the mean of all seeds. What was run is kept, and not run again.
"""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.config import AsyncLocalSGDOptions, LocalSGDOptions  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.method_spec import JsonObject  # noqa: E402
from fairseq_async.server import Receipt, Status, protocol  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation import problem as problems  # noqa: E402
from fairseq_async.simulation.cluster import Cluster, Distribution, Trace, read_trace  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, Method, ScheduleOptions  # noqa: E402
from fairseq_async.simulation.schedule import LearningRate  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import SharedModel  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

SCHEDULING = ("none", "grace", "grace and dynamic steps")


@dataclass(frozen=True)
class Run:
    """One run; ``rate`` multiplies the method's outer learning rate in the experiment."""

    method: str
    cluster: str
    scheduling: str
    seed: int
    rate: float

    @property
    def key(self) -> str:
        return f"{self.cluster}; {self.scheduling}; {self.method}; seed {self.seed}; rate {self.rate:g}"


@dataclass(frozen=True)
class Outcome:
    """What a run came to; NaN where it diverged. ``staleness`` is the mean of the updates that were applied."""

    loss: float
    seconds: float
    staleness: float


class Bench:
    """Runs an experiment's methods.

    Args:
        out: for the pretrained parameters of each seed, and for what was run.
        grace: the grace period, as a share of the fastest worker's round.
    """

    def __init__(self, experiment: Experiment, out: Path, grace: float) -> None:
        self.experiment, self.out, self.grace = experiment, out, grace
        self.methods = {method.name: method for method in experiment.methods}
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / f"{experiment.path.stem}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.done = {line["key"]: Outcome(**line["outcome"]) for line in map(jsonlib.loads, lines)}

    def run_missing(self, wanted: Sequence[Run], processes: int) -> None:
        """Runs what was not run before, in so many processes."""
        missing = [run for run in wanted if run.key not in self.done]
        for seed in {run.seed for run in missing}:
            self._start(seed, self._model(seed))  # before several processes want it
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            runs = {pool.submit(self.run, run): run for run in missing}
            for finished in as_completed(runs):
                self._keep(runs[finished], finished.result())

    def run(self, run: Run) -> Outcome:
        """The loss at the run's end, its virtual time and its mean staleness."""
        torch.set_num_threads(1)
        cluster, model, staleness = self.experiment.clusters[run.cluster], self._model(run.seed), list[int]()
        start = self._start(run.seed, model)
        model.order = ShardOrder(shard_sizes(model.problem.samples, cluster.workers), run.seed)

        def write(time: float, receipt: Receipt, report: protocol.Report, extra: JsonObject) -> None:
            if receipt.status is Status.APPLIED:
                staleness.append(receipt.staleness)

        seeded = replace(self.experiment, head=self.experiment.head.model_copy(update={"seed": run.seed}))
        trial = Trial(seeded, self.scheduled(run), cluster, model, start, write)
        while trial.advance():
            pass
        loss = math.nan if trial.diverged else trial.evaluate()
        return Outcome(loss, trial.clock.now, fmean(staleness or [0]))

    def scheduled(self, run: Run) -> Method:
        """The method with the run's scheduling and outer learning rate."""
        method = self.methods[run.method]
        options = method.options
        if not isinstance(options, LocalSGDOptions):
            return method
        values: dict[str, Any] = {"outer_lr": getattr(options, "outer_lr", 0.0) * run.rate}
        if isinstance(options, AsyncLocalSGDOptions):
            round_seconds = options.local_steps * fastest_step(self.experiment.clusters[run.cluster])
            values["grace_period"] = 0.0 if run.scheduling == "none" else self.grace * round_seconds
            values["dynamic_local_steps"] = run.scheduling == SCHEDULING[2]
        return replace(method, options=options.model_copy(update=values))

    def _model(self, seed: int) -> SharedModel:
        given = self.experiment
        problem = problems.build(given.head.problem, given.path.resolve().parent, seed, torch.device("cpu"))
        return SharedModel(problem, given.head.batch_size, ShardOrder([problem.samples], seed), seed)

    def _start(self, seed: int, model: SharedModel) -> Tensor:
        """The parameters with which all runs of a seed begin."""
        path, wanted, options = self.out / f"start-{seed}.pt", self.experiment.pretraining, self.experiment.optimizer
        if path.exists():
            start: Tensor = torch.load(path, weights_only=True)
            return start
        if wanted is not None:
            schedule = ScheduleOptions(warmup=self.experiment.schedule.warmup)
            model.pretrain(options, LearningRate(schedule, wanted.lr or options.lr, wanted.steps), wanted.steps)
        torch.save(model.flat.clone(), path)
        return model.flat.clone()

    def _keep(self, run: Run, outcome: Outcome) -> None:
        self.done[run.key] = outcome
        with self._file.open("a") as file:
            file.write(jsonlib.dumps({"key": run.key, "outcome": asdict(outcome)}) + "\n")
        print(f"{run.key}: {math.exp(outcome.loss):.5g} in {outcome.seconds:.0f} s", file=sys.stderr, flush=True)


def fastest_step(cluster: Cluster) -> float:
    """Mean seconds of the fastest worker's step."""
    return min(_mean_seconds(cluster.seconds_of(worker)) for worker in range(cluster.workers))


def _mean_seconds(seconds: float | Distribution | Trace) -> float:
    if isinstance(seconds, Trace):
        return fmean(read_trace(seconds))
    return seconds.mean if isinstance(seconds, Distribution) else float(seconds)


def perplexities(outcomes: Sequence[Outcome]) -> list[float]:
    """Infinite where a run diverged."""
    return [math.exp(min(each.loss, 700.0)) if math.isfinite(each.loss) else math.inf for each in outcomes]


def rows(bench: Bench, cluster: str, scheduling: str, seeds: Sequence[int], rates: Sequence[float]) -> Iterator[Any]:
    """One for each method, at its best outer learning rate."""
    for name, method in bench.methods.items():
        grid = {
            rate: [bench.done[Run(name, cluster, scheduling, seed, rate).key] for seed in seeds]
            for rate in rates_of(method, rates)
        }
        best = min(grid, key=lambda rate: fmean(perplexities(grid[rate])))
        found = perplexities(grid[best])
        yield {
            "method": name,
            "perplexity": fmean(found),
            "standard error": stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan,
            "staleness": fmean(each.staleness for each in grid[best]),
            "virtual s": fmean(each.seconds for each in grid[best]),
            "outer lr": best * getattr(method.options, "outer_lr", math.nan),
            "best is": "inside" if len(grid) == 1 or min(grid) < best < max(grid) else "at the edge of the grid",
        }


def rates_of(method: Method, rates: Sequence[float]) -> Sequence[float]:
    """A method without an outer optimizer has no grid."""
    return rates if isinstance(method.options, LocalSGDOptions) else [1.0]


def main(
    path: Annotated[Path, typer.Argument(help="An experiment.")],
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    rates: Annotated[str, typer.Option(help="The grid: factors of outer_lr.")] = "0.043,0.1,0.14,0.43,1,1.7",
    grace: Annotated[float, typer.Option(min=0, help="Grace period, as a share of the fastest worker's round.")] = 0.1,
    scheduling: Annotated[str, typer.Option(help="Which of: none, grace, grace and dynamic steps.")] = "all",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/outer_rules"),
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print, for each cluster and scheduling, what each method comes to at its best outer learning rate."""
    report = Report(f"outer rules, {path.name}")
    try:
        bench = Bench(experiments.read(path), out, grace)
    except ConfigurationError as error:
        fail(error)
    chosen = SCHEDULING if scheduling == "all" else tuple(each.strip() for each in scheduling.split(","))
    if unknown := set(chosen) - set(SCHEDULING):
        fail(ConfigurationError(f"--scheduling {unknown.pop()}: there are {', '.join(SCHEDULING)}"))
    numbers, tried = range(1, seeds + 1), [float(rate) for rate in rates.split(",")]
    bench.run_missing(
        [
            Run(name, cluster, kind, seed, rate)
            for seed in numbers
            for cluster in bench.experiment.clusters
            for kind in chosen
            for name, method in bench.methods.items()
            for rate in rates_of(method, tried)
        ],
        processes,
    )
    for cluster in bench.experiment.clusters:
        for kind in chosen:
            report.table(f"{cluster}, scheduling {kind}", list(rows(bench, cluster, kind, numbers, tried)))
    report.end(json_file)


if __name__ == "__main__":
    typer.run(main)
