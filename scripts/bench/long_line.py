"""Measures exchanges over a long line that loses packets, by TCP's congestion control.

The server is on this host and the worker on another one, a network namespace behind a cable. Each gradient that the
worker sends makes a step, so an exchange brings a whole model there and another one back.
"""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.protocol import (
    Layout,  # noqa: E402
    Push,  # noqa: E402
)
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.faults.hosts import Cable, other_host  # noqa: E402
from scripts.faults.sgd_server import sgd_spec  # noqa: E402

LOSSES = (0.0, 0.001)
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PATIENCE = 600.0  # seconds for all exchanges of one case


def main(
    parameters: Annotated[int, typer.Option(help="Of the model.")] = 2_000_000,
    mbit: Annotated[float, typer.Option(help="Of the cable.")] = 100.0,
    latency: Annotated[float, typer.Option(help="Seconds from one end of the cable to the other.")] = 0.05,
    exchanges: Annotated[int, typer.Option(help="Of each case, after the first.")] = 8,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control, as cubic or bbr.")] = "cubic",
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
) -> None:
    """Measures exchanges without lost packets and with one in a thousand lost."""
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    report = Report("A worker on another machine, behind a long line")
    rows = []
    with congestion_control(congestion):
        for loss in LOSSES:
            seconds = measure(Cable(latency, loss, mbit * 1e6 / 8), parameters, exchanges)
            rows.append({"loss": loss, "s": seconds, "Mbit/s": 64e-6 * parameters / seconds})
    report.table(f"an exchange of {parameters:,} parameters at {mbit:g} Mbit/s, {latency:g} s, {congestion}", rows)
    report.end(json)


def work(address: str, token: str, parameters: int, exchanges: int) -> None:
    """Runs one worker; prints the seconds of each exchange."""
    client = Client(LastingConnection(address, token, 0))
    spec, layout = sgd_spec(workers=1, publishes=False), Layout.of([("weight", torch.zeros(parameters))])
    if not client.join(layout, spec).initialised:
        client.slot.zero_()
        client.initialise(None)
    gradient, taken, seconds = torch.ones(parameters), torch.empty(parameters), []
    for number in range(exchanges + 1):
        began = time.perf_counter()
        client.push(lambda slot: slot.copy_(gradient), Push(number, number, 1.0))
        client.pull(taken.copy_)
        seconds.append(time.perf_counter() - began)
        assert torch.equal(taken, -(number + 1) * gradient)
    client.leave(finished=True)
    print(jsonlib.dumps(seconds))


@contextmanager
def congestion_control(name: str) -> Iterator[None]:
    """Sets TCP's congestion control until the end of the block, also for network namespaces made in it."""
    before = _CONGESTION.read_text()
    try:
        _CONGESTION.write_text(name)
    except OSError as error:
        raise SystemExit(f"--congestion {name}: {error}") from error
    try:
        yield
    finally:
        _CONGESTION.write_text(before)


def measure(cable: Cable, parameters: int, exchanges: int) -> float:
    """Returns the median seconds of an exchange over this cable, without the first exchange."""
    with other_host(cable) as host, tempfile.TemporaryDirectory() as out:
        server = ServerProcess("scripts.faults.sgd_server", 1, Path(out), Path(out) / "server.log", host=host.near)
        try:
            told = [server.address, server.token, *map(str, (parameters, exchanges))]
            line = [*host.prefix, sys.executable, __file__, "worker", *told]
            own = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(line, env=own, capture_output=True, timeout=_PATIENCE)
        finally:
            server.stop()
    if done.returncode:
        sys.exit(done.stderr.decode())
    return median(jsonlib.loads(done.stdout)[1:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        address, token, *numbers = sys.argv[2:]
        work(address, token, *map(int, numbers))
    else:
        run_main(main)
