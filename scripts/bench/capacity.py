"""Checks the prediction of a server's load: a run of one worker gives the update rate and staleness of two and four.

Workers sleep in place of computing, so that more workers than cores can be measured; some sleep longer than others. In
two cases the server sleeps with each update, too, and is saturated. In some cases the server is in shards; in some the
workers are on another host, a network namespace behind a cable, and exchange the model whole or in fragments. Pushes,
pulls and the server are real, in processes of their own. Each round measures one worker on this host that exchanges the
model whole with a server of one process, predicts from it, and measures the others. The median of the rounds counts.
"""

from __future__ import annotations

import json as jsonlib
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.exchange.linux import environment  # noqa: E402
from fairseq_async.method.spec import local_sgd_spec  # noqa: E402
from fairseq_async.options.config import NesterovOptions, ServerOptions  # noqa: E402
from fairseq_async.reporting.capacity import MeasuredCosts, measure  # noqa: E402
from fairseq_async.simulation.cluster import Cluster, Distribution, Seconds  # noqa: E402
from fairseq_async.simulation.costs import NetworkLink  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.hybrid import HybridWorker  # noqa: E402
from fairseq_async.worker.overlap import local_sgd_worker  # noqa: E402
from fairseq_async.worker.replica import TensorReplica  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.server_queue import Exchanges, Load, ServerQueue  # noqa: E402
from scripts.bench.slow_server import SECONDS  # noqa: E402
from scripts.faults.hosts import Cable, Host, other_host  # noqa: E402
from scripts.faults.sgd_server import sgd_spec  # noqa: E402

WITHIN = 0.15
SLOWER = (1.0, 1.5, 2.0, 3.0)  # each worker's step, in steps of the fastest
WORKERS = (1, 2, 4)
LATENCY = 0.05  # seconds from one end of a cable to the other
LONGER, SMALLER = 4, 4  # factors of runs over a cable: they are longer, because updates are fewer; models are smaller
HERE = Host((), "127.0.0.1", "127.0.0.1")


@dataclass(frozen=True)
class Case:
    """One case to measure.

    Attributes:
        step: seconds of a step of the fastest worker.
        server: seconds for which the server sleeps with each update; each shard sleeps for its part of them.
        shards: number of the server's shards.
        local_steps: number of local steps between exchanges; 0 if every gradient is sent.
        fragments: number of fragments; with several, an exchange has a delay of one step.
        mbit: rate of the cable between workers and server, in Mbit/s each way; 0 for workers on the server's host.
    """

    name: str
    step: float
    server: float = 0.0
    shards: int = 1
    local_steps: int = 0
    fragments: int = 1
    mbit: float = 0.0

    @property
    def program(self) -> str:
        return "fairseq_async.server.programs.local_sgd_main" if self.local_steps else "scripts.bench.slow_server"

    @property
    def options(self) -> NesterovOptions:
        delay = 1 if self.fragments > 1 else 0
        return NesterovOptions(local_steps=self.local_steps, fragments=self.fragments, fragment_delay=delay)

    @property
    def whole(self) -> Case:
        """The same case on one host without fragments and shards, from which predictions are made."""
        return replace(self, fragments=1, mbit=0.0, shards=1)


CASES = (
    Case("gradients", 0.1),
    Case("gradients, a slow server", 0.1, server=0.04),
    Case("gradients, a slow server in 2 shards", 0.1, server=0.08, shards=2),
    Case("local SGD, H = 4", 0.05, local_steps=4),
    Case("local SGD, H = 4, 2 shards", 0.05, local_steps=4, shards=2),
    Case("gradients, 100 Mbit/s", 0.1, mbit=100),
    Case("local SGD, H = 8, 100 Mbit/s", 0.05, local_steps=8, mbit=100),
    Case("local SGD, H = 8 in 4 fragments, 100 Mbit/s", 0.05, local_steps=8, fragments=4, mbit=100),
)


def send_gradients(client: Client, case: Case, workers: int, parameters: int, until: Until) -> None:
    """Runs one worker that sends a gradient after every sleep."""
    parts = [torch.nn.Parameter(part) for part in torch.randn(parameters).chunk(4)]
    for part in parts:
        part.grad = torch.randn_like(part)
    hybrid = HybridWorker(client, [(str(number), part) for number, part in enumerate(parts)])
    slow = {SECONDS: case.server / parameters}
    welcome = hybrid.join(sgd_spec(updates_per_step=1, workers=workers, framework=slow, server_shards=case.shards))
    hybrid.begin(welcome if welcome.initialised else hybrid.bring_parameters(None))
    until.begin()
    while until.goes_on():
        hybrid.step(1, None)


def take_local_steps(client: Client, case: Case, workers: int, parameters: int, until: Until) -> None:
    """Runs one worker that exchanges after several sleeps."""
    parts = torch.randn(parameters).chunk(4)
    replica = TensorReplica([(str(number), torch.nn.Parameter(part)) for number, part in enumerate(parts)])
    worker = local_sgd_worker(client, replica, case.options)
    server = ServerOptions(server_shards=str(case.shards))
    welcome = worker.join(local_sgd_spec(case.options, workers, [], server, {}))
    worker.begin(welcome if welcome.initialised else worker.bring_parameters(None))
    until.begin()
    while until.goes_on():
        worker.step(until.step)


class Until:
    """Reports that a worker is ready, waits until all are, and then sleeps for each step until the time is over."""

    def __init__(self, step: float, seconds: float) -> None:
        self.step, self.seconds, self.ends = step, seconds, 0.0

    def begin(self) -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        self.ends = time.monotonic() + self.seconds

    def goes_on(self) -> bool:
        if time.monotonic() >= self.ends:
            return False
        time.sleep(self.step)
        return True


def work(address: str, token: str, given: str) -> None:
    """Runs one worker's process."""
    torch.set_num_threads(1)
    own = jsonlib.loads(given)
    case, worker = Case(**own["case"]), own["worker"]
    client = Client(LastingConnection(address, token, worker))
    exchanges = take_local_steps if case.local_steps else send_gradients
    exchanges(client, case, own["workers"], own["parameters"], Until(case.step * SLOWER[worker], own["seconds"]))
    client.leave(finished=False)


def run(case: Case, workers: int, parameters: int, seconds: float, out: Path) -> tuple[float, float]:
    """Makes a real run; returns the updates per second and the mean staleness in the middle part of the run."""
    cable = Cable(seconds=LATENCY, bytes_per_second=case.mbit * 1e6 / 8)
    with other_host(cable) if case.mbit else nullcontext(HERE) as host:
        return run_on(host, case, workers, parameters, seconds, out)


def run_on(host: Host, case: Case, workers: int, parameters: int, seconds: float, out: Path) -> tuple[float, float]:
    """Makes a real run with the workers on ``host``; returns the same as :func:`run`."""
    server = ServerProcess(case.program, workers, out, out / "server.log", host=host.near)
    try:
        processes = []
        for worker in range(workers):
            given = {"case": asdict(case), "worker": worker, "workers": workers}
            given |= {"parameters": parameters, "seconds": seconds}
            told = [server.address, server.token, jsonlib.dumps(given)]
            line = [*host.prefix, sys.executable, __file__, "worker", *told]
            own = os.environ | environment() | {"OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(line, env=own, stdin=pipe, stdout=pipe, text=True))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        began = time.time()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.wait(timeout=seconds + 60)
    finally:
        server.stop()
    events = [jsonlib.loads(line) for line in (out / "events.jsonl").open()]
    steady = [event for event in events if 0.2 * seconds < event["time"] - began < 0.9 * seconds]
    rate = (len(steady) - 1) / (steady[-1]["time"] - steady[0]["time"])
    return rate, fmean(event["staleness"] for event in steady)


def predict(case: Case, workers: int, alone: MeasuredCosts) -> tuple[float, Load]:
    """Predicts from a run of one worker: updates per second by the asymptotic bound, and the simulated load.

    The bound is NaN in fragments.
    """
    each, costs = max(1, case.local_steps), replace(alone.costs, shards=case.shards)
    steps = [costs.step / each + (slower - 1) * case.step for slower in SLOWER[:workers]]
    if case.mbit:
        costs = costs.over(NetworkLink(case.mbit / 1000, 1000 * LATENCY))
    exchanges = Exchanges(each, case.fragments, delay=int(case.fragments > 1))
    served = Distribution(distribution="lognormal", mean=costs.server, spread=alone.server_spread)
    cluster = Cluster(workers=workers, seconds_per_step=list[Seconds](steps))
    bound = min(sum(1 / (each * step + costs.exchanging) for step in steps), 1 / costs.busiest)
    return bound if case.fragments == 1 else math.nan, ServerQueue(cluster, costs, exchanges, served=served).run()


def measure_case(case: Case, parameters: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each number of workers, with medians over the rounds."""
    found: dict[int, list[tuple[float, ...]]] = {workers: [] for workers in WORKERS}
    if case.mbit:
        parameters, seconds = parameters // SMALLER, seconds * LONGER
    for _ in range(rounds):
        with TemporaryDirectory() as directory:
            run(case.whole, 1, parameters, seconds, Path(directory) / "alone")
            alone = measure(Path(directory) / "alone")
            for workers in WORKERS:
                rate, stale = run(case, workers, parameters, seconds, Path(directory) / str(workers))
                bound, load = predict(case, workers, alone)
                found[workers].append((rate, bound, load.updates_per_second, stale, load.staleness))
    rows = []
    for workers, rounds_ in found.items():
        rate, bound, simulated, stale, simulated_stale = (median(column) for column in zip(*rounds_, strict=True))
        rates = {
            "updates/s": rate,
            "bound": None if math.isnan(bound) else bound,
            "simulated": simulated,
            "ratio": simulated / rate,
        }
        stales = {"staleness": stale, "simulated staleness": simulated_stale}
        rows.append({"case": case.name, "workers": workers} | rates | stales)
    return rows


def main(
    parameters: Annotated[int, typer.Option(min=1)] = 1_000_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each run.")] = 6,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Cases with this in their name.")] = "",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Predict and measure; exit code 1 if a prediction is more than 15% off."""
    report = Report(f"Capacity: {parameters:,} parameters, a quarter of them over a cable; workers that sleep")
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    chosen = [case for case in CASES if only in case.name]
    rows = [row for case in chosen for row in measure_case(case, parameters, seconds, rounds)]
    report.table("updates a second, and their staleness", rows)
    report.bound("largest error of simulated updates a second", max(abs(row["ratio"] - 1) for row in rows), WITHIN)
    stale = [abs(row["simulated staleness"] / row["staleness"] - 1) for row in rows if row["workers"] > 1]
    report.bound("largest error of simulated staleness", max(stale), WITHIN)
    report.end(json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(*sys.argv[2:])
    else:
        run_main(main)
