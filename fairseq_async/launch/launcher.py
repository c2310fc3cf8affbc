"""Server and workers of one run on this machine, from their start to their end."""

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

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.exchange import environment
from fairseq_async.exchange.authentication import read_token
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.progress import Display, Progress
from fairseq_async.server.client import LOOPBACK, is_loopback
from fairseq_async.server.process import TOKEN, ServerProcess, manner
from fairseq_async.worker.place import SLOWDOWN, WORKER, WORKERS

_FINISHING = 60.0  # seconds for the workers to end after the server; worker 0 may still write its checkpoint
_DYING = 10.0  # seconds for the workers to end by themselves after the server died
_ENDING = 5.0  # seconds between SIGTERM and SIGKILL
_USER_ERROR = 2  # exit code of a worker that cannot run as it was asked to: starting it again would not help


@dataclass
class Worker:
    id: int
    log: Path
    slowdown: float
    process: subprocess.Popen[bytes] = field(init=False)
    restarts: int = 0
    updates_at_start: int = 0


class RunFailedError(AsyncError):
    """A worker or the server ended in a way that ends the run."""


class Launcher:
    """Starts a server and ``workers`` times the same command, restarts workers that die, and ends everything.

    Args:
        slowdown: a factor for each worker, for experiments; empty for none.
        max_restarts: how often each worker may be started again.
        port: of the server; 0 takes a free one.
        host: the address on which the server listens.
        token_file: where the run's token is, for workers that join from other machines; None makes a new token.

    Raises:
        ConfigurationError: options that do not fit together.
    """

    def __init__(
        self,
        command: WorkerCommand,
        workers: int,
        slowdown: Sequence[float],
        max_restarts: int,
        port: int,
        host: str = LOOPBACK,
        token_file: Path | None = None,
    ) -> None:
        if not (is_loopback(host) or token_file):
            raise ConfigurationError(
                f"--host {host}: other machines can reach this address; give a secret with --token-file FILE, made "
                "with: (umask 077; openssl rand -hex 16 > FILE)"
            )
        self.host, self.token = host, read_token(token_file) if token_file else None
        if slowdown and len(slowdown) != workers:
            raise ConfigurationError(f"--slowdown has {len(slowdown)} factors for {workers} workers; give one for each")
        if any(factor < 1 for factor in slowdown):
            raise ConfigurationError("--slowdown: a factor must be at least 1")
        self.command, self.max_restarts, self.port = command, max_restarts, port
        logs = command.run_dir / "logs"
        factors = slowdown or [1.0] * workers
        self.workers = [Worker(w, logs / f"worker-{w}.log", factors[w]) for w in range(workers)]
        self.progress = Progress(command.run_dir / "events.jsonl", workers)

    def run(self) -> None:
        """Returns when the run is finished.

        Raises:
            AsyncError: the run failed; every process has been ended.
            KeyboardInterrupt: it was interrupted; likewise.
        """
        signal.signal(signal.SIGTERM, _interrupt)
        logs = self.command.run_dir / "logs"
        self.server = ServerProcess(
            self.command.server,
            len(self.workers),
            self.command.run_dir,
            logs / "server.log",
            self.port,
            self.host,
            self.token,
            self.max_restarts,
        )
        try:
            with Display(self.progress) as self.display:
                if not is_loopback(self.host):
                    self.display.say(f"others join at {self.server.address}: fairseq-async join --help")
                for worker in self.workers:
                    self._start(worker, self._address)
                self._watch()
            self.display.say(f"finished: {self.progress.summary()}")
        finally:
            self._end_all()
            self.server.stop()

    @property
    def _address(self) -> str:
        """Where the workers on this machine find the server: in shared memory, if it listens there too."""
        return self.server.address.replace("0.0.0.0:", f"{LOOPBACK}:")

    def _start(self, worker: Worker, address: str) -> None:
        worker.updates_at_start = self.progress.updates[worker.id]
        with worker.log.open("ab") as log:
            worker.process = subprocess.Popen(
                self.command.line(address),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment(worker),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others in order
            )
        if not self._on_gpu():
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(worker.process.pid, {cores[worker.id % len(cores)]})

    def _environment(self, worker: Worker) -> dict[str, str]:
        return self._common_environment(worker) | {
            TOKEN: self.server.token,
            WORKER: str(worker.id),
            WORKERS: str(len(self.workers)),
            SLOWDOWN: str(worker.slowdown),
        }

    def _common_environment(self, worker: Worker) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environment()}
        if self._on_gpu():
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = given.split(",") if given else [str(d) for d in range(torch.cuda.device_count())]
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker.id % len(devices)]
        return variables

    def _on_gpu(self) -> bool:
        return torch.cuda.is_available() and not self.command.on_cpu

    def _watch(self) -> None:
        while any(worker.process.poll() is None for worker in self.workers):
            time.sleep(0.2)
            self.display.refresh()
            ended = self.server.poll()
            if ended is not None:
                return self._after_server(ended)
            for worker in self.workers:
                if worker.process.poll() not in (None, 0):
                    self._after_death(worker)
        self.display.refresh()

    def _after_death(self, worker: Worker) -> None:
        code = worker.process.returncode
        self.progress.poll()
        hopeless = code > 0 and self.progress.updates[worker.id] == worker.updates_at_start
        if code == _USER_ERROR or hopeless or worker.restarts >= self.max_restarts:
            raise RunFailedError(self._epitaph(worker))
        worker.restarts += 1
        self.display.say(f"worker {worker.id} {manner(code)}; start {worker.restarts} of {self.max_restarts} again")
        self._start(worker, self._address)

    def _after_server(self, code: int) -> None:
        """The server ends first in a finished run too: workers have said goodbye by then."""
        self.display.refresh()
        if code == 0:
            _wait(self.workers, _FINISHING)
        else:
            raise RunFailedError(f"the server {manner(code)}; log: {self.command.run_dir / 'logs' / 'server.log'}")
        for worker in self.workers:
            if worker.process.poll() != 0 and (worker.id == 0 or worker.process.returncode == _USER_ERROR):
                raise RunFailedError(self._epitaph(worker))

    def _epitaph(self, worker: Worker) -> str:
        """The worker's own last line, without our prefix, says more than its exit code."""
        lines = [line for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].removeprefix("fairseq-async: error: ") if lines else "no output"
        return f"worker {worker.id} {manner(worker.process.returncode)}: {last} (log: {worker.log})"

    def _end_all(self) -> None:
        started = [worker for worker in self.workers if hasattr(worker, "process")]
        for worker in started:
            if worker.process.poll() is None:
                _signal(worker, signal.SIGTERM)
        _wait(started, _ENDING)
        for worker in started:
            _signal(worker, signal.SIGKILL)  # also to what it may have left in its group
            worker.process.wait()


def _wait(workers: Sequence[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.05)


def _signal(worker: Worker, number: signal.Signals) -> None:
    try:
        os.killpg(worker.process.pid, number)
    except ProcessLookupError:
        pass


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
