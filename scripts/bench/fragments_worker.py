"""A worker behind a cable that sleeps in place of computing, and measures its waiting and the bytes it receives.

    python -m scripts.bench.fragments_worker JOB.json

Writes a :class:`Measured` where the :class:`Job` says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica

_EVERY = 0.01  # seconds between two readings
Reading = tuple[float, int]
"""Seconds of the monotonic clock, and the bytes that a device had received by then."""


@dataclass(frozen=True)
class Job:
    """The worker's job.

    Attributes:
        host: this worker's own address, which identifies the device of the cable.
        out: file for the measurements.
        tensors: number of the model's tensors, of ``elements`` each.
        steps: number of local steps after which the worker leaves.
        step_seconds: seconds of a local step.
    """

    address: str
    token: str
    host: str
    out: str
    fragments: int
    delay: int
    local_steps: int
    tensors: int
    elements: int
    steps: int
    step_seconds: float


@dataclass(frozen=True)
class Measured:
    """The measurements, from the worker's first step on.

    Attributes:
        began, ended: seconds of the monotonic clock.
        waited: seconds for which the worker waited in exchanges.
        exchanges: number of exchanges that were answered.
        received: readings of the bytes received at this end of the cable.
    """

    began: float
    ended: float
    waited: float
    exchanges: int
    received: list[Reading]


def peak(readings: Sequence[Reading], window: float) -> float:
    """Returns the highest rate in bytes per second over any window of ``window`` seconds."""
    most, first = 0, 0
    for at, total in readings:
        while readings[first][0] < at - window:
            first += 1
        most = max(most, total - readings[first][1])
    return most / window


def device_of(address: str) -> str:
    """Returns the name of the network device that has this address."""
    rows = subprocess.run(["ip", "-o", "-4", "addr"], check=True, capture_output=True, text=True).stdout.splitlines()
    return next(row.split()[1] for row in rows if f" {address}/" in row)


@contextmanager
def received(device: str) -> Iterator[list[Reading]]:
    """Collects readings of the bytes that the device has received, until the end of the block."""
    readings: list[Reading] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(_EVERY):
            rows = Path("/proc/self/net/dev").read_text().splitlines()
            count = next(row.partition(":")[2].split()[0] for row in rows if row.strip().startswith(f"{device}:"))
            readings.append((time.monotonic(), int(count)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def work(job: Job) -> Measured:
    """Takes the steps. Does not measure the first and last transfer of the whole model, which every run has."""
    options = DelayedNesterovOptions(
        local_steps=job.local_steps, fragments=job.fragments, fragment_delay=job.delay, outer_lr=0.1
    )
    named = [(f"layer{number}", torch.zeros(job.elements)) for number in range(job.tensors)]
    client = Client(LastingConnection(job.address, job.token, 0))
    worker = local_sgd_worker(client, TensorReplica(named), options)
    welcome = worker.join(local_sgd_spec(options, 1, [], None, {}))
    worker.begin(welcome if welcome.initialised else worker.bring_parameters(None))
    waited, exchanges = 0.0, 0
    with received(device_of(job.host)) as readings:
        began = time.monotonic()
        for _ in range(job.steps):
            time.sleep(job.step_seconds)
            for _, tensor in named:
                tensor += 1e-3
            if worker.step(job.step_seconds):
                waited, exchanges = waited + worker.last["waiting_seconds"], exchanges + 1
        worker.settle()
        ended = time.monotonic()
    client.leave(finished=False)
    return Measured(began, ended, waited, exchanges, readings)


def main() -> None:
    torch.set_num_threads(1)
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.out).write_text(json.dumps(asdict(work(job))))


if __name__ == "__main__":
    main()
