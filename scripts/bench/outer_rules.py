"""Compares outer rules of local SGD, each at its best outer learning rate, with the same scheduling for all.

Every method computes the same number of local steps from the same pretrained parameters, on the same data. All
asynchronous methods have one of three kinds of scheduling: none (updates that arrive at the same moment are applied
together, so that equal workers have staleness 0), a grace period, and a grace period with dynamic local steps. The
outer learning rate of each method, cluster and scheduling is the one of a grid with the least loss of the first seed:
it goes up the grid until a perplexity is a quarter above the least so far, since a search that stops where both
neighbours are worse can stop at a minimum that is not the least. All seeds then run at this rate. Results of runs are
kept, and these are not run again.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.environment import PLUGINS  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.exchange.linux import end_with_parent  # noqa: E402
from fairseq_async.method.spec import JsonObject  # noqa: E402
from fairseq_async.options.config import AsyncLocalSGDOptions, LocalSGDOptions  # noqa: E402
from fairseq_async.protocol import Receipt, Status  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation.cluster import Cluster, Distribution, Trace, read_trace  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, Method, ScheduleOptions  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.schedule import LearningRate  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import SharedModel  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report, perplexity  # noqa: E402

PLAIN = "SGD"  # the rule without momentum, which others have to beat
SCHEDULING = ("none", "grace", "grace and dynamic steps")
GRACE = 0.1
HOPELESS = 1.25  # times the least perplexity so far: higher rates are worse still


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
    """The result of a run; the loss is NaN if it diverged. ``staleness`` is the mean over the applied updates."""

    loss: float
    seconds: float
    staleness: float


class Bench:
    """Runs an experiment's methods.

    Args:
        out: directory for the pretrained parameters of each seed and the results of runs.
        grace: the grace period, as a share of the fastest worker's round.
    """

    def __init__(self, experiment: Experiment, out: Path, grace: float) -> None:
        self.experiment, self.out, self.grace = experiment, out, grace
        self.methods = {method.name: method for method in experiment.methods}
        of_grace = "" if grace == GRACE else f"_grace_{grace:g}"  # results of one are none of another
        self.done = Kept(out / f"{experiment.path.stem}{of_grace}.jsonl", Outcome)

    def compare(self, seeds: Sequence[int], rates: Sequence[float], kinds: Sequence[str], processes: int) -> None:
        """Runs what has no result yet, one cluster and scheduling after another, in this number of processes."""
        for seed in seeds:
            self._start(seed, self._model(seed))  # made here, before several processes need it
        context, its_end = get_context("spawn"), (signal.SIGKILL, os.getpid())
        with ProcessPoolExecutor(processes, context, end_with_parent, its_end) as pool:
            for cluster in self.experiment.clusters:
                for kind in kinds:
                    self._run_all([Search(self, name, cluster, kind, seeds, rates) for name in self.methods], pool)

    def _run_all(self, searches: Sequence[Search], pool: Executor) -> None:
        """Makes all searches at once; starts each run as soon as a search wants it."""
        running = {pool.submit(self.run, run): (search, run) for search in searches for run in search.wanted()}
        while running:
            for finished in wait(running, return_when=FIRST_COMPLETED).done:
                search, run = running.pop(finished)
                self._keep(run, finished.result())
                at_it = [other for _, other in running.values()]
                running |= {pool.submit(self.run, new): (search, new) for new in search.wanted() if new not in at_it}

    def run(self, run: Run) -> Outcome:
        """Makes a run; returns its last loss, its virtual time and its mean staleness."""
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
        """Returns the run's method with its scheduling and outer learning rate."""
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
        """Returns the parameters with which all runs of a seed begin."""
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
        self.done.keep(run.key, outcome)
        print(f"{run.key}: {perplexity(outcome.loss):.5g} in {outcome.seconds:.0f} s", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Search:
    """The search for a method's best outer learning rate on a cluster.

    The first seed goes up the grid until a rate is hopeless, and then all seeds run at the best one.
    """

    bench: Bench
    method: str
    cluster: str
    scheduling: str
    seeds: Sequence[int]
    rates: Sequence[float]

    @property
    def grid(self) -> list[float]:
        """The rates in ascending order; only one for a method without an outer optimizer."""
        has_rate = isinstance(self.bench.methods[self.method].options, LocalSGDOptions)
        return sorted(self.rates) if has_rate else [1.0]

    def at(self, seed: int, rate: float) -> Run:
        """Returns the run with this seed and rate; a synchronous method has one run for all kinds of scheduling."""
        scheduled = isinstance(self.bench.methods[self.method].options, AsyncLocalSGDOptions)
        return Run(self.method, self.cluster, self.scheduling if scheduled else SCHEDULING[0], seed, rate)

    def best(self) -> int:
        """Returns the grid index of the rate with the least perplexity of those that the first seed has run at."""
        done, first = self.bench.done, self.seeds[0]
        tried = {p: done[key] for p, rate in enumerate(self.grid) if (key := self.at(first, rate).key) in done}
        return min(tried, key=lambda place: perplexities([tried[place]])[0])

    def wanted(self) -> list[Run]:
        """Returns the next runs of the search; none when the search is over."""
        least = math.inf
        for rate in self.grid:
            run = self.at(self.seeds[0], rate)
            if run.key not in self.bench.done:
                return [run]
            (here,) = perplexities([self.bench.done[run.key]])
            if here > HOPELESS * least:
                break
            least = min(least, here)
        return [run for run in self.at_rate(self.grid[self.best()]) if run.key not in self.bench.done]

    def found(self) -> list[Outcome]:
        """Returns the results of all seeds at the best rate."""
        return [self.bench.done[run.key] for run in self.at_rate(self.grid[self.best()])]

    def at_rate(self, rate: float) -> list[Run]:
        return [self.at(seed, rate) for seed in self.seeds]


def fastest_step(cluster: Cluster) -> float:
    """Returns the mean seconds of the fastest worker's step."""
    return min(_mean_seconds(cluster.seconds_of(worker)) for worker in range(cluster.workers))


def _mean_seconds(seconds: float | Distribution | Trace) -> float:
    if isinstance(seconds, Trace):
        return fmean(read_trace(seconds))
    return seconds.mean if isinstance(seconds, Distribution) else float(seconds)


def perplexities(outcomes: Sequence[Outcome]) -> list[float]:
    """Returns the perplexity of each run; infinite if it diverged."""
    return [perplexity(each.loss) for each in outcomes]


def rows(searches: Sequence[Search]) -> Iterator[dict[str, Any]]:
    """Yields a row per method at its best rate, compared with the first method, and with SGD seed by seed."""
    found = {search.method: search.found() for search in searches}
    first = found[searches[0].method]
    for search in searches:
        outcomes, place = found[search.method], search.best()
        mean, seconds = fmean(perplexities(outcomes)), fmean(each.seconds for each in outcomes)
        grid, options = search.grid, search.bench.methods[search.method].options
        apart = [own.loss - other.loss for own, other in zip(outcomes, found.get(PLAIN, []), strict=False)]
        yield {
            "method": search.method,
            "outer lr": grid[place] * getattr(options, "outer_lr", math.nan),
            "perplexity": mean,
            "± (standard error)": standard_error(perplexities(outcomes)),
            f"of {searches[0].method}'s": mean / fmean(perplexities(first)),
            "time of its": seconds / fmean(each.seconds for each in first),
            "staleness": fmean(each.staleness for each in outcomes),
            f"loss − {PLAIN}'s": fmean(apart) if apart else math.nan,
            "± (of pairs)": standard_error(apart),
            "best is": "inside" if len(grid) == 1 or 0 < place < len(grid) - 1 else "at the edge of the grid",
        }


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; NaN for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main(
    path: Annotated[Path, typer.Argument(help="An experiment.")],
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    rates: Annotated[str, typer.Option(help="The grid: factors of outer_lr.")] = "0.1,0.21,0.43,1,1.7,2.9,5,8.6",
    grace: Annotated[
        float, typer.Option(min=0, help="Grace period, as a share of the fastest worker's round.")
    ] = GRACE,
    scheduling: Annotated[str, typer.Option(help="Which of: none, grace, grace and dynamic steps.")] = "all",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/outer_rules"),
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print, for each cluster and scheduling, what each method comes to at its best outer learning rate."""
    rules = Path(__file__).resolve().parents[2] / "recipes" / "rules" / "register.py"
    os.environ.setdefault(PLUGINS, str(rules))  # several experiments compare with them
    report = Report(f"outer rules, {path.name}")
    try:
        bench = Bench(experiments.read(path), out, grace)
    except ConfigurationError as error:
        fail(error)
    chosen = SCHEDULING if scheduling == "all" else tuple(each.strip() for each in scheduling.split(","))
    if unknown := set(chosen) - set(SCHEDULING):
        fail(ConfigurationError(f"--scheduling {unknown.pop()}: there are {', '.join(SCHEDULING)}"))
    numbers, tried = range(1, seeds + 1), [float(rate) for rate in rates.split(",")]
    try:
        bench.compare(numbers, tried, chosen, processes)
    except ConfigurationError as error:
        fail(error)
    for cluster in bench.experiment.clusters:
        for kind in chosen:
            searches = [Search(bench, name, cluster, kind, numbers, tried) for name in bench.methods]
            report.table(f"{cluster}, scheduling {kind}", list(rows(searches)))
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
