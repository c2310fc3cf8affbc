"""Measures the peak rate on a line and the time that a worker waits, with the model whole and in fragments.

The worker is in a network namespace at the other end of a cable, the server on this host. A step takes time but
computes nothing, so that other load of the machine changes the figures little. Bytes are counted where they arrive, for
each direction of the cable by itself: pushes at the server's end, parameters at the worker's.
"""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.errors import AsyncError, fail  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import environment, run_main  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.fragments_worker import Job, Measured, Reading, device_of, peak, received  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.faults.hosts import Cable, Host, other_host  # noqa: E402

MODULE, WORKER = "fairseq_async.server.programs.local_sgd_main", "scripts.bench.fragments_worker"
TENSORS = 8  # of equal size, since a fragment is no smaller than the largest tensor
WINDOW = 1.0  # seconds over which a peak is measured
MOST_PEAK, MOST_WAITING, LEAST_WAITING_WHOLE = 1 / 6, 0.01, 0.1
LATENCY = 0.002  # seconds
LONGEST = 500.0  # seconds of a run


@dataclass(frozen=True)
class Row:
    """One run, as a table shows it."""

    fragments: int
    delay: int
    exchanges: int
    seconds: float
    waiting: float
    peak_pushes: float
    peak_parameters: float


def row(job: Job, measured: Measured, pushed: list[Reading]) -> Row:
    """Returns the figures of a run: peaks in MB/s of each direction, and the waiting as a share of the time."""
    within = [reading for reading in pushed if measured.began <= reading[0] <= measured.ended]
    peaks = [peak(readings, WINDOW) / 1e6 for readings in (within, measured.received)]
    seconds = measured.ended - measured.began
    return Row(job.fragments, job.delay, measured.exchanges, seconds, measured.waited / seconds, *peaks)


def run(host: Host, out: Path, fragments: int, delay: int, rounds: int, shape: tuple[int, int, float]) -> Row:
    """Runs ``rounds`` rounds of H local steps; ``shape`` is H, the number of parameters and the seconds of a step."""
    local_steps, parameters, seconds = shape
    directory = out / f"fragments-{fragments}"
    server = ServerProcess(MODULE, 1, directory, directory / "server.log", host=host.near)
    try:
        job = Job(
            address=server.address,
            token=server.token,
            host=host.far,
            out=str((directory / "measured.json").resolve()),
            fragments=fragments,
            delay=delay,
            local_steps=local_steps,
            tensors=TENSORS,
            elements=parameters // TENSORS,
            steps=rounds * local_steps,
            step_seconds=seconds,
        )
        path = directory.resolve() / "job.json"
        path.write_text(jsonlib.dumps(asdict(job)))
        path.chmod(0o600)  # the file holds the token
        command = [*host.prefix, sys.executable, "-m", WORKER, str(path)]
        with received(device_of(host.near)) as pushed:
            subprocess.run(command, env=environment(), check=True, timeout=LONGEST)
        return row(job, Measured(**jsonlib.loads(Path(job.out).read_text())), pushed)
    finally:
        server.stop()


def main(
    out: Annotated[Path, typer.Option(help="For logs.")] = Path("runs/bench/fragments"),
    fragments: Annotated[int, typer.Option(min=2, max=TENSORS, help="P, beside 1.")] = 8,
    delay: Annotated[int, typer.Option(help="τ, of the run in fragments.")] = 6,
    local_steps: Annotated[int, typer.Option(help="H.")] = 96,
    step_seconds: Annotated[float, typer.Option()] = 0.1,
    parameters: Annotated[int, typer.Option(help="Of the model.")] = 2_500_000,
    rounds: Annotated[int, typer.Option(min=2, help="Of H local steps.")] = 5,
    mbit: Annotated[float, typer.Option(help="Of the cable, each way.")] = 100.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure both; exit code 1 if a bound is broken."""
    jobs.claim(out)
    shape = local_steps, parameters, step_seconds
    report = Report(f"Fragments: a worker at {mbit:g} Mbit/s, {parameters:,} parameters, H {local_steps}")
    try:
        with other_host(Cable(LATENCY, 0.0, mbit * 1e6 / 8)) as host:
            whole, parts = (run(host, out, p, tau, rounds, shape) for p, tau in ((1, 0), (fragments, delay)))
    except AsyncError as error:
        fail(error)
    report.table(
        f"share of the time that the worker waits; peaks in MB/s over {WINDOW:g} s", [asdict(whole), asdict(parts)]
    )
    report.bound("peak of pushes, of that of the whole model", parts.peak_pushes / whole.peak_pushes, MOST_PEAK)
    report.bound(
        "peak of parameters, of that of the whole model", parts.peak_parameters / whole.peak_parameters, MOST_PEAK
    )
    report.bound("share of waiting, whole model", whole.waiting, LEAST_WAITING_WHOLE, at_least=True)
    report.bound("share of waiting, in fragments", parts.waiting, MOST_WAITING)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
