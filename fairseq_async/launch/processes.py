"""The same command, started several times on this machine, each with its device or core; and how they end."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from fairseq_async.errors import AsyncError
from fairseq_async.exchange.linux import environment
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.server.process import manner

_ENDING = 5.0  # seconds between SIGTERM and SIGKILL


@dataclass
class Worker:
    """One worker's process and its log."""

    id: int
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    restarts: int = 0
    updates_at_start: int = 0


class RunFailedError(AsyncError):
    """A worker or the server ended in a way that ends the run."""


class Processes:
    """The workers of one command.

    Args:
        count: how many.
    """

    def __init__(self, command: WorkerCommand, count: int) -> None:
        self.command = command
        self.workers = [Worker(number, command.run_dir / "logs" / f"worker-{number}.log") for number in range(count)]

    def start(self, worker: Worker, address: str | None, variables: dict[str, str]) -> None:
        """Starts one, with these variables of the environment beside those that all have; its log gets its output."""
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        with worker.log.open("ab") as log:
            worker.process = subprocess.Popen(
                self.command.line(address),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment(worker) | variables,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others in order
            )
        if not self.on_gpu:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(worker.process.pid, {cores[worker.id % len(cores)]})

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available() and not self.command.on_cpu

    @property
    def running(self) -> bool:
        return any(worker.process.poll() is None for worker in self.workers)

    @property
    def failed(self) -> list[Worker]:
        """Those that have ended with an error."""
        return [worker for worker in self.workers if worker.process.poll() not in (None, 0)]

    def wait(self, seconds: float, ids: Sequence[int] | None = None) -> None:
        """Until these, or all, have ended, or for so long."""
        _wait([worker for worker in self.workers if ids is None or worker.id in ids], seconds)

    def epitaph(self, worker: Worker) -> str:
        """How it ended. The worker's own last line, without our prefix, says more than its exit code."""
        lines = [line for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].removeprefix("fairseq-async: error: ") if lines else "no output"
        return f"worker {worker.id} {manner(worker.process.returncode)}: {last} (log: {worker.log})"

    def end(self) -> None:
        """Asks them to end, and kills those that do not."""
        started = [worker for worker in self.workers if hasattr(worker, "process")]
        for worker in started:
            if worker.process.poll() is None:
                _signal(worker, signal.SIGTERM)
        _wait(started, _ENDING)
        for worker in started:
            _signal(worker, signal.SIGKILL)  # also to what it may have left in its group
            worker.process.wait()

    def _environment(self, worker: Worker) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environment()}
        if self.on_gpu:
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = given.split(",") if given else [str(d) for d in range(torch.cuda.device_count())]
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker.id % len(devices)]
        return variables


def _wait(workers: Sequence[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.05)


def _signal(worker: Worker, number: signal.Signals) -> None:
    try:
        os.killpg(worker.process.pid, number)
    except ProcessLookupError:
        pass


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handles a signal as Ctrl-C."""
    raise KeyboardInterrupt
