"""How well the capacity of a server is predicted: from one real worker, the updates a second of one to four.

Workers sleep in place of computing, so that more of them than cores can be measured; pushes, pulls and the server are
real, in processes of their own.
"""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.exchange.linux import environment  # noqa: E402
from fairseq_async.reporting.capacity import measure  # noqa: E402
from fairseq_async.server.process import ServerProcess  # noqa: E402
from fairseq_async.worker.client import Client  # noqa: E402
from fairseq_async.worker.hybrid import HybridWorker  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.faults.sgd_server import sgd_spec  # noqa: E402

WITHIN = 0.15


def work(address: str, token: str, worker: int, workers: int, parameters: int, step: float, seconds: float) -> None:
    """One worker's process; it says when it is ready, and begins when it is told to."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.randn(parameters))
    parameter.grad = torch.randn(parameters)
    hybrid = HybridWorker(Client(address, token, worker), [("all", parameter)], 3)
    welcome = hybrid.join(sgd_spec(updates_per_step=1, workers=workers))
    hybrid.begin(welcome if welcome.initialised else hybrid.bring_parameters(None))
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(step)
        hybrid.step(1, None)
    hybrid.client.leave(finished=False)


def run(workers: int, parameters: int, step: float, seconds: float, out: Path) -> float:
    """A real run; returns its updates a second, by the events of its middle."""
    server = ServerProcess("scripts.bench.sgd_server", workers, out, out / "server.log")
    try:
        given = [server.address, server.token]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "worker", *given, *map(str, (w, workers, parameters, step, seconds))],
                env=os.environ | environment() | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for w in range(workers)
        ]
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
    times = [jsonlib.loads(line)["time"] for line in (out / "events.jsonl").open()]
    steady = [at for at in times if 0.2 * seconds < at - began < 0.9 * seconds]
    return (len(steady) - 1) / (steady[-1] - steady[0])


def main(
    parameters: Annotated[int, typer.Option(min=1)] = 5_000_000,
    steps: Annotated[str, typer.Option(help="Seconds for which a worker computes, in turn.")] = "0.2,0.03",
    seconds: Annotated[float, typer.Option(min=1, help="Of each run.")] = 8,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Predict and measure; exit code 1 if a prediction is more than 15% off."""
    report = Report(f"Capacity: {parameters:,} parameters, shared memory, SGD in the server")
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    rows: list[dict[str, Any]] = []
    for step in map(float, steps.split(",")):
        with TemporaryDirectory() as directory:
            for workers in range(1, 5):
                out = Path(directory) / str(workers)
                measured = run(workers, parameters, step, seconds, out)
                if workers == 1:
                    costs = measure(out).costs
                predicted = costs.updates_per_second(workers)
                row: dict[str, Any] = {"step s": step, "workers": workers, "held": costs.workers_held}
                rows.append(row | {"measured": measured, "predicted": predicted, "ratio": predicted / measured})
    report.table("updates a second", rows)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    report.bound("largest error of a prediction", worst, WITHIN)
    report.end(json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        address, token, worker, workers, parameters, step, seconds = sys.argv[2:]
        work(address, token, int(worker), int(workers), int(parameters), float(step), float(seconds))
    else:
        typer.run(main)
