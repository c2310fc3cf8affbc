"""Simulated runs of a second: on a cluster of three workers of different speed, and tiny ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import JsonValue
from torch import Tensor

from fairseq_async.protocol import Receipt, Report
from fairseq_async.simulation.experiment import Experiment, read
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes

BASE: dict[str, Any] = {
    "problem": {"type": "gaussians", "samples": 256, "hidden": 8},
    "steps": 12,
    "batch_size": 4,
    "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "schedule": {"type": "cosine", "warmup": 3, "minimum": 0.1},
    "cluster": {"workers": 3, "seconds_per_step": [1.0, 1.5, 4.0]},
}
DN = {"method": "local_sgd", "outer": "delayed_nesterov", "local_steps": 3}
METHODS = {
    "hybrid": {"method": "hybrid_async"},
    "synchronous": {"method": "hybrid_async", "barrier": True},
    "DiLoCo": {"method": "local_sgd", "outer": "diloco", "local_steps": 3},
    "DN with grace": DN | {"dynamic_local_steps": True, "grace_period": 2.0},
    "compensated": {"method": "local_sgd", "outer": "nesterov", "local_steps": 2, "delay_compensation": 0.5},
    "buffered": {"method": "local_sgd", "outer": "buffered_nesterov", "local_steps": 2, "staleness_power": -0.5},
    "adasum": {"method": "adasum", "local_steps": 2},
    "adascale": {"method": "adascale", "optimizer": {"type": "sgd", "lr": 0.1}},
}


class Log:
    """What a trial writes."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Receipt, Report]] = []
        self.extra: list[Mapping[str, JsonValue]] = []

    def __call__(self, time: float, receipt: Receipt, report: Report, extra: Mapping[str, JsonValue]) -> None:
        self.events.append((time, receipt, report))
        self.extra.append(extra)

    def lines(self) -> list[str]:
        return [repr(event) for event in zip(self.events, self.extra, strict=True)]

    def of(self, worker: int) -> list[float]:
        return [time for time, receipt, _ in self.events if receipt.worker == worker]


def experiment(tmp_path: Path, **changes: Any) -> Experiment:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"methods": {"DN": DN}} | BASE | changes, sort_keys=False))
    return read(path)


def trial(given: Experiment, log: Log | None = None, kind: type[SharedModel] = SharedModel) -> Trial:
    """The first method on the first cluster."""
    torch.manual_seed(given.seed)
    arguments = {key: value for key, value in given.head.problem.items() if key != "type"}
    problem = Gaussians(given.seed, torch.device("cpu"), **arguments)
    (cluster,) = given.clusters.values()
    order = ShardOrder(shard_sizes(problem.samples, cluster.workers), given.seed)
    model = kind(problem, given.head.batch_size, order, given.seed)
    return Trial(given, given.methods[0], cluster, model, model.flat.clone(), log or Log())


def finish(given: Trial) -> Tensor:
    while given.advance():
        pass
    return given.parameters


def run(tmp_path: Path, method: dict[str, Any], **changes: Any) -> tuple[Trial, Log]:
    log = Log()
    simulated = trial(experiment(tmp_path, methods={"it": method}, **changes), log)
    finish(simulated)
    return simulated, log


def tiny_experiment(tmp_path: Path, method: dict[str, Any], **changes: Any) -> Experiment:
    """One method; ``changes`` are keys of the experiment file."""
    given: dict[str, Any] = {
        "problem": {"type": "gaussians", "samples": 64, "hidden": 2},
        "steps": 6,
        "batch_size": 2,
        "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        "methods": {"it": method},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(given | changes, sort_keys=False))
    return read(path)


def tiny_trial(tmp_path: Path, method: dict[str, Any], log: Log, **changes: Any) -> Trial:
    """One method on one cluster, on the CPU unless ``device`` says otherwise."""
    return trial_of(tiny_experiment(tmp_path, method, **changes), log, changes.get("device", "cpu"))


def trial_of(given: Experiment, log: Log, device: str = "cpu") -> Trial:
    torch.manual_seed(given.seed)
    problem = Gaussians(given.seed, torch.device(device), samples=64, hidden=2)
    (cluster,) = given.clusters.values()
    order = ShardOrder(shard_sizes(problem.samples, cluster.workers), given.seed)
    model = SharedModel(problem, given.head.batch_size, order, given.seed)
    return Trial(given, given.methods[0], cluster, model, model.flat.clone(), log)
