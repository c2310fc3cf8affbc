"""How many workers a server holds, from what a run has measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fairseq_async.errors import ConfigurationError
from fairseq_async.server import Layout

_WARM_UP = 2  # a worker's first updates, with which memory is touched for the first time
_FEWEST = 5


@dataclass(frozen=True)
class Costs:
    """What one update of one worker costs, in seconds.

    A worker computes for ``step``, then exchanges; of the exchange the server is busy for ``server``, with one update
    at a time. Over a network the parameters also go out and come back, on the worker's link and on the server's.

    Attributes:
        step: computing.
        exchange: from the end of computing to the new parameters, where nobody else is in the way.
        server: of that, what nobody else can have at the same time.
        parameters: how many go each way, 4 bytes each.
        link: bytes per second each way; infinite on one machine.
        servers: shards of the parameters, each on a server with a link of its own.
    """

    step: float
    exchange: float
    server: float
    parameters: int
    link: float = math.inf
    servers: int = 1

    @property
    def alone(self) -> float:
        """Seconds from update to update of a worker that has the server for itself."""
        return self.step + self.exchange - self.server + self.server / self.servers + 2 * self._transfer

    @property
    def busiest(self) -> float:
        """Seconds per update of what is busiest: the server's processor, or its link in one direction."""
        return max(self.server, self._transfer) / self.servers

    def updates_per_second(self, workers: int) -> float:
        """Of all workers together: they come in the way of nobody until the server is busy all the time.

        The asymptotic bound of a closed queue (Denning & Buzen 1978), which steady times reach.
        """
        return min(workers / self.alone, 1 / self.busiest)

    @property
    def workers_held(self) -> float:
        """Beyond this number the server is the bottleneck, and more workers give nothing."""
        return self.alone / self.busiest

    def of_size(self, parameters: int) -> "Costs":
        """Of another model: everything in proportion to its parameters."""
        by = parameters / self.parameters
        times = {name: getattr(self, name) * by for name in ("step", "exchange", "server")}
        return replace(self, parameters=parameters, **times)

    @property
    def _transfer(self) -> float:
        return 4 * self.parameters / self.link


@dataclass(frozen=True)
class Measured:
    """What a run's events say: its costs, its workers and the updates a second that they came to."""

    costs: Costs
    workers: int
    updates_per_second: float


def measure(run_dir: Path) -> Measured:
    """Reads a run without a barrier, best of one worker or two, whose exchanges nobody else is in the way of.

    Raises:
        ConfigurationError: there is no such run, or too little of it.
    """
    try:
        description = json.loads((run_dir / "run.json").read_text())
        lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{run_dir}: no run that can be read there: {error}") from error
    if description["method"]["barrier"]:
        raise ConfigurationError(f"{run_dir}: a run with a barrier says nothing of what an exchange costs by itself")
    if "simulated" in description or not all("server_seconds" in event for event in events):
        raise ConfigurationError(f"{run_dir}: no measured times of the server in events.jsonl")
    own = [list(of) for _, of in groupby(sorted(events, key=lambda e: e["worker"]), lambda e: e["worker"])]
    rows = [row for each in own for row in _rows(each)]
    if len(rows) < _FEWEST:
        raise ConfigurationError(f"{run_dir}: {len(events)} updates are too few to measure costs by")
    exchange, gap = median(row["exchange"] for row in rows), median(row["gap"] for row in rows)
    server = fmean(sorted(row["server"] for row in rows)[: math.ceil(0.9 * len(rows))])  # without the worst moments
    costs = Costs(max(gap - exchange, 1e-9), exchange, server, Layout.from_json(description["layout"]).size)
    rate = sum(1 / median(r["gap"] for r in _rows(each)) for each in own if _rows(each))
    return Measured(costs, len(own), rate)


def _rows(events: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Of one worker's updates: what lies between two of them, and what of that was exchange. Each event tells of the
    exchange before it."""
    steady = events[_WARM_UP:]
    return [
        {"gap": after["time"] - before["time"], "exchange": _exchange(after), "server": after["server_seconds"]}
        for before, after in zip(steady, steady[1:], strict=False)
    ]


def _exchange(event: dict[str, Any]) -> float:
    if "waiting_seconds" in event:
        return float(event["waiting_seconds"])
    return float(event["push_seconds"] + event["pull_seconds"])
