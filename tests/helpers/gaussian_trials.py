"""A simulated trial of a second, and what it writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import JsonValue

from fairseq_async.protocol import Receipt, Report
from fairseq_async.simulation.experiment import Experiment, read
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.trial import Trial
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes


class Log:
    """The events of a trial: virtual time, receipt and report."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Receipt, Report]] = []
        self.extra: list[Mapping[str, JsonValue]] = []

    def __call__(self, time: float, receipt: Receipt, report: Report, extra: Mapping[str, JsonValue]) -> None:
        self.events.append((time, receipt, report))
        self.extra.append(extra)

    def lines(self) -> list[str]:
        return [repr(event) for event in zip(self.events, self.extra, strict=True)]


def experiment(tmp_path: Path, method: dict[str, Any], **changes: Any) -> Experiment:
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


def trial(tmp_path: Path, method: dict[str, Any], log: Log, **changes: Any) -> Trial:
    """One method on one cluster, on the CPU unless ``device`` says otherwise."""
    given = experiment(tmp_path, method, **changes)
    torch.manual_seed(given.seed)
    problem = Gaussians(given.seed, torch.device(changes.get("device", "cpu")), samples=64, hidden=2)
    (cluster,) = given.clusters.values()
    order = ShardOrder(shard_sizes(problem.samples, cluster.workers), given.seed)
    model = SharedModel(problem, given.head.batch_size, order, given.seed)
    return Trial(given, given.methods[0], cluster, model, model.flat.clone(), log)
