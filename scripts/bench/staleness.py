"""Separates hybrid's distance from the synchronous run into that by staleness and that by the choice of batches.

Makes four runs from one state. Hybrid differs from the synchronous run in two things: the batches that meet in a step,
since a fast worker gives more of them, and the staleness of some gradients, which were computed a version ago. Here
each of the two also differs alone. A stale gradient is as good as a current one if a step does not turn the gradient;
the runs therefore measure the angle as well.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.algorithms import Update  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.method.spec import JsonObject  # noqa: E402
from fairseq_async.options.config import HybridOptions  # noqa: E402
from fairseq_async.protocol import Receipt  # noqa: E402
from fairseq_async.server import ParameterServer  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation.cluster import Cluster  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, Method, ScheduleOptions  # noqa: E402
from fairseq_async.simulation.problems import problem as problems  # noqa: E402
from fairseq_async.simulation.rules import build_method  # noqa: E402
from fairseq_async.simulation.schedule import LearningRate  # noqa: E402
from fairseq_async.simulation.trial import Trial  # noqa: E402
from fairseq_async.simulation.workers import LogicalWorker, SharedModel  # noqa: E402
from fairseq_async.worker.shards import BatchKey, ShardOrder, shard_sizes  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

_FEWEST = 40  # steps: the first look is at an eighth of them, and goes 4 versions back


@dataclass(frozen=True)
class Gradient:
    """A worker's ``number``-th gradient, computed at version ``base`` and applied to version ``version``."""

    worker: int
    number: int
    base: int
    version: int


class NoGradients(SharedModel):
    """A model that computes no gradients, to find only the order in which they arrive."""

    def gradient(self, worker: LogicalWorker, batches: Sequence[BatchKey], average: int = 1) -> float:
        worker.weight = 1.0
        return 0.0


def arrivals(experiment: Experiment, method: Method, cluster: Cluster, model: SharedModel) -> list[Gradient]:
    """Returns the gradients in the order in which the server receives them, by the simulator's clock."""
    found: list[Gradient] = []

    def write(time: float, receipt: Receipt, report: protocol.Report, extra: JsonObject) -> None:
        found.append(Gradient(receipt.worker, receipt.sequence, receipt.base_version, len(found) // cluster.workers))

    silent = NoGradients(model.problem, model.batch_size, model.order, model.seed)
    trial = Trial(experiment, method, cluster, silent, model.flat.clone(), write)
    while trial.advance():
        pass
    model.live_in(model.flat)
    return found


class Turning:
    """Measures the cosine between the mean gradient of some batches now and 1 and 4 versions before.

    The batches are the first ones of the last quarter of each shard.
    """

    AGO = (1, 4)
    BATCHES = 64

    def __init__(self, model: SharedModel, versions: Sequence[int]) -> None:
        self.model, self.versions = model, versions
        self.found: list[dict[str, float]] = []
        self._probe = LogicalWorker(0, torch.zeros_like(model.flat))

    def look(self, version: int, past: dict[int, torch.Tensor]) -> None:
        if version in self.versions:
            now = self._gradient(past[version])
            angles = {f"{ago} before": _cosine(now, self._gradient(past[version - ago])) for ago in self.AGO}
            self.found.append({"version": version} | angles)

    def _gradient(self, parameters: torch.Tensor) -> torch.Tensor:
        self.model.flat.copy_(parameters)
        total, shards = torch.zeros_like(parameters), self.model.order.sizes
        for number in range(self.BATCHES):
            shard = number % len(shards)
            first = 3 * shards[shard] // (4 * self.model.batch_size)
            self.model.gradient(self._probe, [(shard, first + number // len(shards))])
            total += self._probe.delta
        return total


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.dot(one, other) / (one.norm() * other.norm()))


def train(
    experiment: Experiment,
    method: Method,
    model: SharedModel,
    start: torch.Tensor,
    gradients: Sequence[Gradient],
    turning: Turning,
) -> float:
    """Computes and applies the gradients; returns the loss at the end."""
    parameters, workers = start.clone(), 1 + max(each.worker for each in gradients)
    built = build_method(method, experiment, workers, model.order.sizes, parameters, model.layout)
    server = ParameterServer(parameters, built.rule)
    past = {0: start}
    at = [LogicalWorker(worker, torch.zeros_like(start)) for worker in range(workers)]
    model.live_in(model.flat)
    for each in gradients:
        worker = at[each.worker]
        model.flat.copy_(past[each.base])
        model.gradient(worker, [(each.worker, each.number)])
        server.push(Update(worker.id, each.number, each.base, worker.weight, worker.delta))
        if server.version not in past:
            past[server.version] = parameters.clone()
            past.pop(server.version - 16, None)
            turning.look(server.version, past)
    model.flat.copy_(parameters)
    return model.evaluate()


@dataclass(frozen=True)
class Four:
    """The results of four runs from one state."""

    losses: dict[str, float]
    turnings: dict[str, list[dict[str, float]]]


def four_runs(experiment: Experiment, pretraining: int) -> Four:
    """Makes the four runs, from the initial parameters or after ``pretraining`` steps of plain training."""
    (cluster,), seed, options = experiment.clusters.values(), experiment.seed, experiment.optimizer
    if experiment.head.bf16:
        raise ConfigurationError(f'{experiment.path}: "bf16" is not measured here: leave it out')
    problem = problems.build(experiment.head.problem, experiment.path.resolve().parent, seed, torch.device("cpu"))
    model = SharedModel(problem, experiment.head.batch_size, ShardOrder([problem.samples], seed), seed)
    if pretraining:
        lr = experiment.pretraining.lr if experiment.pretraining else None
        schedule = ScheduleOptions(warmup=experiment.schedule.warmup)
        model.pretrain(options, LearningRate(schedule, lr or options.lr, pretraining), pretraining)
    model.order = ShardOrder(shard_sizes(problem.samples, cluster.workers), seed)
    start = model.flat.clone()
    papers = HybridOptions(updates_per_step=cluster.workers, look_ahead=0.0)
    methods = [Method("", each, options) for each in (HybridOptions(barrier=True), papers)]
    synchronous, hybrid = (arrivals(experiment, method, cluster, model) for method in methods)
    runs = {
        "synchronous": synchronous,
        "its batches, all gradients one version old": [replace(e, base=max(0, e.version - 1)) for e in synchronous],
        "hybrid's batches, no gradient old": [replace(each, base=each.version) for each in hybrid],
        "hybrid": hybrid,
    }
    steps = hybrid[-1].version
    versions = [steps // 8, steps // 4, steps // 2, steps]
    losses, turnings = {}, {}
    for name, gradients in runs.items():
        turning = Turning(model, versions if name in ("synchronous", "hybrid") else [])
        losses[name] = train(experiment, methods[1], model, start, gradients, turning)
        turnings[name] = turning.found
    return Four(losses, turnings)


def main(
    path: Annotated[Path, typer.Argument(help="An experiment; of its methods only the optimizer is taken.")],
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    pretraining: Annotated[int, typer.Option(min=0, help="Steps, in place of the file's.")] = 0,
    lr: Annotated[float | None, typer.Option(help="In place of the file's.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print the last perplexities of four runs a seed, how far apart their losses are, and how gradients turn."""
    report = Report(f"staleness and batches, {path.name}, {pretraining} steps of pretraining")
    try:
        given = experiments.read(path)
        if len(given.clusters) > 1 or given.steps < _FEWEST:
            raise ConfigurationError(f"{path}: this wants one cluster, and at least {_FEWEST} steps")
    except ConfigurationError as error:
        fail(error)
    found = []
    options = given.optimizer.model_copy(update={} if lr is None else {"lr": lr})
    for seed in range(1, seeds + 1):
        head = given.head.model_copy(update={"seed": seed})
        found.append(four_runs(replace(given, head=head, optimizer=options), pretraining))
        print(seed, {name: round(math.exp(loss), 2) for name, loss in found[-1].losses.items()}, flush=True)
    report.table("last losses", [_row(name, [four.losses for four in found]) for name in found[0].losses])
    rows = []
    for name, first in found[0].turnings.items():
        for number, looked in enumerate(first):
            means = {key: fmean(four.turnings[name][number][key] for four in found) for key in looked}
            rows.append({"run": name, "version": looked["version"]} | {
                f"cosine with {key}": f"{value:.3f}" for key, value in means.items() if key != "version"
            })  # fmt: skip
    report.table("mean gradient of the same batches, now and before", rows)
    report.end(json_file)


def _row(name: str, losses: list[dict[str, float]]) -> dict[str, str]:
    apart = [row[name] - row["synchronous"] for row in losses]
    error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    perplexities = ", ".join(f"{math.exp(row[name]):.1f}" for row in losses)
    return {"run": name, "perplexity": perplexities, "loss above": f"{fmean(apart):+.3f} ± {error:.3f}"}


if __name__ == "__main__":
    run_main(main)
