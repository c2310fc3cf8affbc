"""Measures the memory of local SGD's server: parameters, momentum, buffer of delayed Nesterov, a slot per worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.method.spec import local_sgd_spec  # noqa: E402
from fairseq_async.options.config import DelayedNesterovOptions  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.overlap import local_sgd_worker  # noqa: E402
from fairseq_async.worker.replica import TensorReplica  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench import exchange_times, jobs  # noqa: E402
from scripts.bench.memory import UPDATES, WORKERS, Memory, server_rows  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

COPIES_IN_SERVER = 3.0


def local_server(parameters: int, out: Path) -> dict[str, Memory]:
    """Returns a server's memory after some exchanges, and after it has also written its state for a checkpoint."""
    process = ServerProcess("fairseq_async.server.programs.local_sgd_main", WORKERS, out, out / "server.log")
    options = DelayedNesterovOptions(local_steps=1)
    try:
        workers = []
        for number in range(WORKERS):
            client = Client(LastingConnection(process.address, process.token, number))
            workers.append(local_sgd_worker(client, TensorReplica(exchange_times.model(parameters)), options))
            welcome = workers[-1].join(local_sgd_spec(options, WORKERS, [], None, {}))
            workers[-1].begin(welcome if welcome.initialised else workers[-1].bring_parameters(None))
        for _ in range(UPDATES):
            for worker in workers:
                worker.step(seconds=0.1)
        updated = Memory.of(process.process.pid)
        workers[0].client.save_state(str(out.resolve() / "state.pt"))
        return {"after updates": updated, "after a checkpoint": Memory.of(process.process.pid)}
    finally:
        process.stop()


def main(
    out: Annotated[Path, typer.Option(help="For logs.")] = Path("runs/bench"),
    parameters: Annotated[int, typer.Option(min=1, help="Size of the server's model.")] = 25_000_000,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure the server's memory; exit code 1 if the bound is broken."""
    torch.set_num_threads(1)
    report = Report(f"Memory: local SGD, delayed Nesterov, {WORKERS} workers, in copies of the fp32 parameters")
    jobs.claim(out)
    rows = server_rows(parameters, out / "local-memory", local_server)
    report.table(f"server, {parameters:,} parameters", rows)
    most = max(round(row["own copies"] + row["shared copies"], 2) for row in rows)
    report.bound(f"server, with {WORKERS} slots", most, COPIES_IN_SERVER + WORKERS)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
