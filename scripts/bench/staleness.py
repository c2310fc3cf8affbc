"""How much of hybrid's distance from the synchronous run is staleness, and how much the choice of batches.

Four runs from one state. Hybrid differs from the synchronous run in two things: which batches meet in a step, since a
fast worker gives more of them, and that some gradients were computed a version ago. Here each differs alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import Update  # noqa: E402
from fairseq_async.server import ParameterServer, Receipt  # noqa: E402
from fairseq_async.simulation import experiment as experiments  # noqa: E402
from fairseq_async.simulation import problem as problems  # noqa: E402
from fairseq_async.simulation.cluster import Cluster  # noqa: E402
from fairseq_async.simulation.experiment import Experiment, Method, ScheduleOptions  # noqa: E402
from fairseq_async.simulation.schedule import LearningRate  # noqa: E402
from fairseq_async.simulation.trial import Trial, deal  # noqa: E402
from fairseq_async.simulation.workers import LogicalWorker, SharedModel  # noqa: E402
from fairseq_async.worker.shards import ShardOrder, shard_sizes  # noqa: E402
from scripts.bench.report import Report  # noqa: E402


@dataclass(frozen=True)
class Gradient:
    """A worker's ``number``-th, computed at version ``base`` and applied to version ``version``."""

    worker: int
    number: int
    base: int
    version: int


class NoGradients(SharedModel):
    """For the order in which gradients arrive: it computes none."""

    def gradient(self, worker: LogicalWorker, shard: int, number: int) -> float:
        worker.weight = 1.0
        return 0.0


def arrivals(experiment: Experiment, method: Method, cluster: Cluster, model: SharedModel) -> list[Gradient]:
    """In the order in which the server takes them, as the simulator's clock has it."""
    found: list[Gradient] = []

    def write(time: float, receipt: Receipt, report: dict[str, Any]) -> None:
        found.append(Gradient(receipt.worker, receipt.sequence, receipt.base_version, len(found) // cluster.workers))

    silent = NoGradients(model.problem, model.batch_size, model.order, model.seed)
    trial = Trial(experiment, method, cluster, silent, model.flat.clone(), write)
    while trial.advance():
        pass
    model.live_in(model.flat)
    return found


def train(
    experiment: Experiment, method: Method, model: SharedModel, start: torch.Tensor, gradients: Sequence[Gradient]
) -> float:
    """Applies them; returns the loss at the end."""
    parameters, workers = start.clone(), 1 + max(each.worker for each in gradients)
    dealt = deal(method, experiment, workers, model.order.sizes, parameters, model.layout)
    server = ParameterServer(parameters, dealt.rule)
    past = {0: start}
    at = [LogicalWorker(worker, torch.zeros_like(start)) for worker in range(workers)]
    model.live_in(model.flat)
    for each in gradients:
        worker = at[each.worker]
        worker.sequence = each.number
        model.flat.copy_(past[each.base])
        model.gradient(worker, each.worker, each.number)
        server.push(Update(worker.id, each.number, each.base, worker.weight, worker.delta))
        if server.version not in past:
            past[server.version] = parameters.clone()
            past.pop(server.version - 16, None)
    model.flat.copy_(parameters)
    return model.evaluate()


def four_runs(path: Path, seed: int, pretraining: int | None) -> dict[str, float]:
    """The last losses."""
    given = experiments.read(path)
    experiment = replace(given, head=given.head.model_copy(update={"seed": seed}))
    methods = {"barrier": True, "hybrid": False}
    (cluster,) = experiment.clusters.values()
    problem = problems.build(experiment.head.problem, path.resolve().parent, seed, torch.device("cpu"))
    order = ShardOrder(shard_sizes(problem.samples, cluster.workers), seed)
    model = SharedModel(problem, experiment.head.batch_size, order, seed)
    if pretraining:
        lr = experiment.pretraining.lr if experiment.pretraining else None
        model.order = ShardOrder([problem.samples], seed)
        schedule = ScheduleOptions(warmup=experiment.schedule.warmup)
        rate = LearningRate(schedule, lr or experiment.optimizer.lr, pretraining)
        model.pretrain(experiment.optimizer, rate, pretraining)
        model.order = order
    start = model.flat.clone()
    found = {}
    for name, barrier in methods.items():
        method = next(m for m in experiment.methods if bool(getattr(m.options, "barrier", False)) is barrier and (
            getattr(m.options, "updates_per_step", None) != 1))  # fmt: skip
        found[name] = method, arrivals(experiment, method, cluster, model)
    plain, (hybrid, ours) = found["barrier"][1], found["hybrid"]
    runs = {
        "synchronous": [replace(each, base=each.version) for each in plain],
        "its batches, all gradients one version old": [replace(e, base=max(0, e.version - 1)) for e in plain],
        "hybrid's batches, no gradient old": [replace(each, base=each.version) for each in ours],
        "hybrid": ours,
    }
    return {name: train(experiment, hybrid, model, start, gradients) for name, gradients in runs.items()}


def main(
    experiment: Annotated[Path, typer.Argument(help="An experiment with a hybrid and a synchronous method.")],
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    pretraining: Annotated[int, typer.Option(min=0, help="Steps, in place of the file's.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print the last perplexities of four runs a seed, and the mean distances of their losses."""
    report = Report(f"staleness and batches, {experiment}, {pretraining} steps of pretraining")
    losses = []
    for seed in range(1, seeds + 1):
        losses.append(four_runs(experiment, seed, pretraining))
        print(seed, {name: round(math.exp(loss), 2) for name, loss in losses[-1].items()}, flush=True)
    rows = []
    for name in losses[0]:
        apart = [row[name] - row["synchronous"] for row in losses]
        spread = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
        perplexities = " ".join(f"{math.exp(row[name]):.4g}" for row in losses)
        rows.append({"run": name, "perplexity": perplexities, "loss above the synchronous": f"{fmean(apart):+.3f}",
                     "standard error": f"{spread:.3f}"})  # fmt: skip
    report.table("last losses", rows)
    report.end(json_file)


if __name__ == "__main__":
    typer.run(main)
