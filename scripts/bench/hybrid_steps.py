"""Compares hybrid's steps with synchronous SGD: last loss, virtual time, and time to the synchronous run's last loss.

The learning rate is the same for all: the best of a grid for the synchronous run, by the mean of all seeds; with
`--own-rates`, each method has the best of the grid for itself in each cluster. Every method computes the same number of
gradients; where that has a bound, the last method goes on to twice as many, to see when it reaches the synchronous
run's last loss. The parameters of a synchronous run do not depend on the machines' speed, so it is trained once per
seed.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, cast

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.method.spec import JsonObject  # noqa: E402
from fairseq_async.protocol import Receipt  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, Method  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import LogicalWorker, SharedModel  # noqa: E402
from fairseq_async.worker.shards import BatchKey, ShardOrder, shard_sizes  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report, perplexity  # noqa: E402
from scripts.bench.staleness import NoGradients  # noqa: E402

BOUNDS: dict[str, tuple[float, float | None, float | None]] = {
    "1, 1, 1, 2": (1.02, 0.6, 1.5),
    "1, 1, 2, 4": (1.03, 0.45, 1.5),
    "equal, 10% noise": (1.01, 1.05, None),
    "1, 1, 2, 4, 30% noise": (1.04, 0.5, None),
    "16, two of them 4": (1.02, None, None),
}
"""Bounds per cluster: perplexity over the synchronous run's, share of its time, times sooner at its last loss."""
_FURTHER = 2.0  # relative length of the last method's run: more than the time in which it must reach the loss
SYNCHRONOUS = "synchronous"
Wanted = tuple[Method, str, int, float]
"""A run: method, cluster, seed and learning rate."""


class OwnParts(SharedModel):
    """Each worker draws from a part of its own, anew in each pass, as where a script divides the data, not what
    the server deals: a fast worker trains more passes."""

    @cached_property
    def _drawn(self) -> Counter[int]:
        return Counter()

    @cached_property
    def _whole(self) -> ShardOrder:
        return ShardOrder([self.problem.samples], self.seed)

    def gradient(self, worker: LogicalWorker, batches: Sequence[BatchKey], average: int = 1) -> float:
        first = self._drawn[worker.id]
        self._drawn[worker.id] += len(batches)
        own = [(worker.id, number) for number in range(first, first + len(batches))]
        return super().gradient(worker, own, average)

    def _samples(self, shard: int, number: int) -> Sequence[int]:
        workers = len(self.order.sizes)
        batch = number * workers + shard  # fairseq gives each worker every k-th batch of a pass
        return self._whole.indices(0, batch * self.batch_size, self.batch_size)


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        curve: virtual seconds and loss at each evaluation, also beyond the end of the runs that are compared.
        gradients: mean number of gradients in a step.
        staleness: mean staleness of all gradients.
        bleu: of the test set's translations at the end, where it was asked for.
    """

    loss: float
    seconds: float
    gradients: float
    staleness: float
    curve: list[tuple[float, float]]
    bleu: float | None = None

    def time_to(self, loss: float) -> float:
        """Returns the seconds to the first evaluation with at most this loss; NaN if there is none."""
        return next((seconds for seconds, reached in self.curve if reached <= loss), math.nan)


class Bench:
    """Runs methods of an experiment; keeps results in the file ``cache``, and reads them from there.

    Args:
        bleu: translates the test set at the end of each run; the problem must be one of translation.
        kind: of the model that the workers of a run share.
    """

    def __init__(
        self, experiment: Experiment, cache: Path, bleu: bool = False, kind: type[SharedModel] = SharedModel
    ) -> None:
        self.experiment, self.bleu, self.kind, self._done = experiment, bleu, kind, Kept(cache, Outcome)

    def run_missing(self, wanted: Sequence[Wanted], processes: int) -> None:
        """Runs those of the wanted runs that have no result yet, in this number of processes."""
        missing = {self._key(each): each for each in wanted if self._key(each) not in self._done}
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            runs = {pool.submit(self.run, *each): key for key, each in missing.items()}
            for run in as_completed(runs):
                self._keep(runs[run], run.result())

    def outcome(self, method: Method, cluster: str, seed: int, lr: float) -> Outcome:
        """Returns the result of a run.

        A synchronous run is trained once for all clusters of as many workers, and timed for each cluster.
        """
        found = self._done[self._key((method, cluster, seed, lr))]
        return replace(found, seconds=self._seconds(method, cluster, seed)) if method.name == SYNCHRONOUS else found

    def best(
        self, method: Method, cluster: str, seeds: Sequence[int], rates: Sequence[float]
    ) -> tuple[float, list[Outcome]]:
        """Returns the best of these learning rates, and the results of all seeds at it."""
        grid = {rate: [self.outcome(method, cluster, seed, rate) for seed in seeds] for rate in rates}
        return min(grid.items(), key=lambda rate_and_found: mean_perplexity(rate_and_found[1]))

    def _key(self, wanted: Wanted) -> str:
        method, cluster, seed, lr = wanted
        where = self.experiment.clusters[cluster].workers if method.name == SYNCHRONOUS else cluster
        return f"{where}; {method.name}; seed {seed}; lr {lr:g}"

    def _keep(self, key: str, outcome: Outcome) -> None:
        self._done.keep(key, outcome)
        print(f"{key}: {perplexity(outcome.loss):.5g} in {outcome.seconds:.0f} s", file=sys.stderr, flush=True)

    def run(self, method: Method, cluster: str, seed: int, lr: float) -> Outcome:
        torch.set_num_threads(1)
        further = _FURTHER if cluster in BOUNDS and method == self.experiment.methods[-1] else 1.0
        trial, receipts = self._trial(method, cluster, seed, lr, further, self.kind)
        workers = trial.cluster.workers
        steps, every = self.experiment.steps * workers, self.experiment.evaluate_every * workers
        curve: list[tuple[float, float]] = []
        at_end: Outcome | None = None
        seen = 0.0
        while trial.advance():
            if trial.steps // every > seen // every:
                curve.append((trial.clock.now, trial.evaluate()))
                seen = trial.steps
            if at_end is None and trial.steps >= steps:
                end = curve[-1][1]
                count = trial.server.version
                at_end = Outcome(end, trial.clock.now, len(receipts) / count, fmean(r.staleness for r in receipts), [])
                if self.bleu:
                    at_end = replace(at_end, bleu=cast(Any, trial.model.problem).bleu())
        assert at_end is not None
        return replace(at_end, curve=curve)

    def _seconds(self, method: Method, cluster: str, seed: int) -> float:
        """Returns the virtual seconds of a run, without computing gradients."""
        trial, _ = self._trial(method, cluster, seed, self.experiment.optimizer.lr, 1.0, NoGradients)
        while trial.advance():
            pass
        return trial.clock.now

    def _trial(
        self,
        method: Method,
        cluster_name: str,
        seed: int,
        lr: float,
        further: float,
        kind: type[SharedModel],
    ) -> tuple[Trial, list[Receipt]]:
        given, cluster = self.experiment, self.experiment.clusters[cluster_name]
        steps = math.ceil(given.steps * further)
        seeded = replace(given, head=given.head.model_copy(update={"seed": seed, "steps": steps}))
        problem = problems.build(given.head.problem, given.path.resolve().parent, seed, torch.device("cpu"))
        order = ShardOrder(shard_sizes(problem.samples, cluster.workers), seed)
        model = kind(problem, given.head.batch_size, order, seed, given.head.bf16)
        rated = replace(method, optimizer=method.optimizer.model_copy(update={"lr": lr}))
        receipts: list[Receipt] = []

        def write(time: float, receipt: Receipt, report: protocol.Report, extra: JsonObject) -> None:
            receipts.append(receipt)

        return Trial(seeded, rated, cluster, model, model.flat.clone(), write), receipts


def perplexities(outcomes: Sequence[Outcome]) -> str:
    """Returns the mean of the seeds' perplexities and its standard error, as text."""
    found = [perplexity(outcome.loss) for outcome in outcomes]
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return f"{fmean(found):.1f} ± {error:.1f}"


def rows(bench: Bench, cluster: str, seeds: Sequence[int], rates: Sequence[float]) -> Iterator[dict[str, object]]:
    """Yields a row for each method, at the best of these rates; the synchronous method comes first."""
    reference: list[Outcome] = []
    for method in bench.experiment.methods:
        lr, found = bench.best(method, cluster, seeds, rates)
        reference = reference or found
        speedups = [s.seconds / each.time_to(s.loss) for s, each in zip(reference, found, strict=True)]
        yield {
            "method": method.name,
            "rate": f"{lr:g}",
            "loss": fmean(each.loss for each in found),
            "perplexity": perplexities(found),
            "over synchronous": mean_perplexity(found) / mean_perplexity(reference),
            "share of its time": fmean(f.seconds / s.seconds for f, s in zip(found, reference, strict=True)),
            "times sooner at its last loss": fmean(speedups) if method.name != SYNCHRONOUS else 1.0,
            "gradients a step": fmean(each.gradients for each in found),
            "staleness": fmean(each.staleness for each in found),
        } | ({"BLEU": ", ".join(f"{each.bleu:.1f}" for each in found)} if bench.bleu else {})


def check(report: Report, cluster: str, row: dict[str, Any]) -> None:
    """Checks the bounds for this cluster, if there are any, in the row of the last method."""
    if cluster not in BOUNDS:
        return
    perplexity, share, sooner = BOUNDS[cluster]
    report.bound(f"{cluster}: perplexity over synchronous", row["over synchronous"], perplexity)
    if share is not None:
        report.bound(f"{cluster}: share of its time", row["share of its time"], share)
    if sooner is not None:
        report.bound(f"{cluster}: times sooner at its last loss", row["times sooner at its last loss"], sooner, True)


def mean_perplexity(outcomes: Sequence[Outcome]) -> float:
    return fmean(perplexity(outcome.loss) for outcome in outcomes)


def main(
    path: Annotated[Path, typer.Argument(help="An experiment whose first method is called synchronous.")],
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    rates: Annotated[str, typer.Option(help="The grid of learning rates.")] = "0.0005,0.001,0.002,0.004",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    cache: Annotated[Path | None, typer.Option(help="What was run, to go on from.")] = None,
    own_rates: Annotated[bool, typer.Option("--own-rates", help="Each method at its own best rate.")] = False,
    bleu: Annotated[bool, typer.Option("--bleu", help="Translate the test set at the end of each run.")] = False,
    own_parts: Annotated[
        bool, typer.Option("--own-parts", help="Workers draw from parts of their own, not what is dealt.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print, for each cluster, what each method comes to at the synchronous run's best learning rate, or at its own."""
    report = Report(f"hybrid's steps, {path.name}")
    try:
        kept = cache or Path("runs/hybrid_steps") / f"{path.stem}{'_own_parts' if own_parts else ''}.jsonl"
        bench = Bench(experiments.read(path), kept, bleu, OwnParts if own_parts else SharedModel)
    except ConfigurationError as error:
        fail(error)
    if bleu and bench.experiment.head.problem["type"] != "fairseq_translation":
        fail(f"--bleu: {path} has no translations to score; leave it out")
    (synchronous, *others), clusters = bench.experiment.methods, list(bench.experiment.clusters)
    numbers, tried = range(1, seeds + 1), [float(rate) for rate in rates.split(",")]
    bench.run_missing([(synchronous, clusters[0], seed, rate) for seed in numbers for rate in tried], processes)
    best, _ = bench.best(synchronous, clusters[0], numbers, tried)
    theirs = tried if own_rates else [best]
    wanted = [(m, cluster, seed, rate) for seed in numbers for rate in theirs for cluster in clusters for m in others]
    bench.run_missing(wanted, processes)
    for method in bench.experiment.methods if own_rates else [synchronous]:
        for cluster in clusters if method is not synchronous else clusters[:1]:
            grid = {rate: [bench.outcome(method, cluster, seed, rate) for seed in numbers] for rate in tried}
            report.table(
                f"learning rates of {method.name}, {cluster}",
                [{"rate": f"{rate:g}", "perplexity": perplexities(found)} for rate, found in grid.items()],
            )
    for cluster in clusters:
        found = list(rows(bench, cluster, numbers, theirs))
        report.table(cluster, found)
        check(report, cluster, found[-1])
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
