"""How well a server's load is predicted: from one real worker, the updates a second and the staleness of two and four.

Workers sleep in place of computing, so that more of them than cores can be measured, and some sleep longer than
others; in one case the server sleeps with each update, too, and is saturated. Pushes, pulls and the server are real, in
processes of their own. Each round measures one worker, predicts, and measures the others: what counts is the median of
the rounds.
"""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.config import NesterovOptions  # noqa: E402
from fairseq_async.exchange.linux import environment  # noqa: E402
from fairseq_async.method_spec import local_sgd_spec  # noqa: E402
from fairseq_async.reporting.capacity import Measured, measure  # noqa: E402
from fairseq_async.server.process import ServerProcess  # noqa: E402
from fairseq_async.simulation.cluster import Cluster, Distribution, Seconds  # noqa: E402
from fairseq_async.simulation.server_queue import Load, ServerQueue  # noqa: E402
from fairseq_async.worker.client import Client  # noqa: E402
from fairseq_async.worker.hybrid import HybridWorker  # noqa: E402
from fairseq_async.worker.local_sgd_workers import local_sgd_worker  # noqa: E402
from fairseq_async.worker.replica import TensorReplica  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.slow_server import SECONDS  # noqa: E402
from scripts.faults.sgd_server import sgd_spec  # noqa: E402

WITHIN = 0.15
SLOWER = (1.0, 1.5, 2.0, 3.0)  # of the workers, times the step
WORKERS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """What is measured: seconds of a step of the fastest worker, and for which the server sleeps; local steps, where
    gradients are not sent at each."""

    name: str
    step: float
    server: float = 0.0
    local_steps: int = 0

    @property
    def program(self) -> str:
        return "fairseq_async.server.local_sgd_main" if self.local_steps else "scripts.bench.slow_server"


CASES = (
    Case("gradients", 0.1),
    Case("gradients, a slow server", 0.1, server=0.04),
    Case("local SGD, H = 4", 0.05, local_steps=4),
)


def send_gradients(client: Client, case: Case, workers: int, parameters: int, until: Until) -> None:
    """One worker that sends a gradient after every sleep."""
    parameter = torch.nn.Parameter(torch.randn(parameters))
    parameter.grad = torch.randn(parameters)
    hybrid = HybridWorker(client, [("all", parameter)], 3)
    welcome = hybrid.join(sgd_spec(updates_per_step=1, workers=workers, framework={SECONDS: case.server}))
    hybrid.begin(welcome if welcome.initialised else hybrid.bring_parameters(None))
    until.begin()
    while until.goes_on():
        hybrid.step(1, None)


def take_local_steps(client: Client, case: Case, workers: int, parameters: int, until: Until) -> None:
    """One worker that exchanges after several sleeps."""
    options = NesterovOptions(local_steps=case.local_steps)
    worker = local_sgd_worker(client, TensorReplica([("all", torch.nn.Parameter(torch.randn(parameters)))]), options)
    welcome = worker.join(local_sgd_spec(options, workers, [], None, {}))
    worker.begin(welcome if welcome.initialised else worker.bring_parameters(None))
    until.begin()
    while until.goes_on():
        worker.step(until.step)


class Until:
    """Says that a worker is ready, waits for all to be, and then sleeps for its step until time is over."""

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
    """One worker's process."""
    torch.set_num_threads(1)
    own = jsonlib.loads(given)
    case, worker = Case(**own["case"]), own["worker"]
    client = Client(address, token, worker)
    exchanges = take_local_steps if case.local_steps else send_gradients
    exchanges(client, case, own["workers"], own["parameters"], Until(case.step * SLOWER[worker], own["seconds"]))
    client.leave(finished=False)


def run(case: Case, workers: int, parameters: int, seconds: float, out: Path) -> tuple[float, float]:
    """A real run; returns its updates a second and their mean staleness, by the events of its middle."""
    server = ServerProcess(case.program, workers, out, out / "server.log")
    try:
        processes = []
        for worker in range(workers):
            given = {"case": asdict(case), "worker": worker, "workers": workers}
            given |= {"parameters": parameters, "seconds": seconds}
            line = [sys.executable, __file__, "worker", server.address, server.token, jsonlib.dumps(given)]
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


def predict(case: Case, workers: int, alone: Measured) -> tuple[float, Load]:
    """Updates a second by the asymptotic bound, and the simulated load, from a run of one worker."""
    costs, slept = alone.costs, case.step * max(1, case.local_steps)
    steps: list[Seconds] = [costs.step + (slower - 1) * slept for slower in SLOWER[:workers]]
    served = Distribution(distribution="lognormal", mean=costs.server, spread=alone.server_spread)
    simulated = ServerQueue(Cluster(workers=workers, seconds_per_step=steps), costs, served=served).run()
    each = [1 / (float(step) + costs.exchange) for step in steps if isinstance(step, float)]
    return min(sum(each), 1 / costs.busiest), simulated


def measure_case(case: Case, parameters: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of all numbers of workers; medians over the rounds."""
    found: dict[int, list[tuple[float, ...]]] = {workers: [] for workers in WORKERS}
    for _ in range(rounds):
        with TemporaryDirectory() as directory:
            for workers in WORKERS:
                out = Path(directory) / str(workers)
                rate, stale = run(case, workers, parameters, seconds, out)
                if workers == 1:
                    alone = measure(out)
                bound, load = predict(case, workers, alone)
                found[workers].append((rate, bound, load.updates_per_second, stale, load.staleness))
    rows = []
    for workers, rounds_ in found.items():
        rate, bound, simulated, stale, simulated_stale = (median(column) for column in zip(*rounds_, strict=True))
        rates = {"updates/s": rate, "bound": bound, "simulated": simulated, "ratio": simulated / rate}
        stales = {"staleness": stale, "simulated staleness": simulated_stale}
        rows.append({"case": case.name, "workers": workers} | rates | stales)
    return rows


def main(
    parameters: Annotated[int, typer.Option(min=1)] = 1_000_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each run.")] = 6,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Predict and measure; exit code 1 if a prediction is more than 15% off."""
    report = Report(f"Capacity: {parameters:,} parameters, shared memory, workers that sleep")
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    rows = [row for case in CASES for row in measure_case(case, parameters, seconds, rounds)]
    report.table("updates a second, and their staleness", rows)
    report.bound("largest error of simulated updates a second", max(abs(row["ratio"] - 1) for row in rows), WITHIN)
    stale = [abs(row["simulated staleness"] / row["staleness"] - 1) for row in rows if row["workers"] > 1]
    report.bound("largest error of simulated staleness", max(stale), WITHIN)
    report.end(json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(*sys.argv[2:])
    else:
        typer.run(main)
