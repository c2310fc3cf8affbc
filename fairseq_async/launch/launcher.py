"""Server and workers of one run on this machine, from their start to their end."""

import signal
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

from fairseq_async.environment import SLOWDOWN, TOKEN, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange.addresses import LOOPBACK, is_loopback
from fairseq_async.exchange.authentication import read_token
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.processes import Processes, RunFailedError, Worker, interrupt
from fairseq_async.launch.progress import Display, Progress
from fairseq_async.server.process import ServerProcess, manner

_FINISHING = 60.0  # seconds for worker 0 to end after the server; it may still write its checkpoint
_LEAVING = 5.0  # seconds for the other workers; what does not end by then hangs
_USER_ERROR = 2  # exit code of a worker that cannot run as it was asked to: starting it again would not help


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
        if slowdown and len(slowdown) != workers:
            raise ConfigurationError(f"--slowdown has {len(slowdown)} factors for {workers} workers; give one for each")
        if not all(1 <= factor < inf for factor in slowdown):
            raise ConfigurationError("--slowdown: a factor must be a number of at least 1")
        self.slowdown = slowdown or [1.0] * workers
        self.host, self.token = host, read_token(token_file) if token_file else None
        self.command, self.max_restarts, self.port = command, max_restarts, port
        self.processes = Processes(command, workers)
        self.progress = Progress(command.run_dir / "events.jsonl", workers)

    def run(self) -> None:
        """Returns when the run is finished.

        Raises:
            AsyncError: the run failed; every process has been ended.
            KeyboardInterrupt: it was interrupted; likewise.
        """
        signal.signal(signal.SIGTERM, interrupt)
        self.server = ServerProcess(
            self.command.server,
            len(self.processes.workers),
            self.command.run_dir,
            self.command.run_dir / "logs" / "server.log",
            self.port,
            self.host,
            self.token,
            self.max_restarts,
        )
        try:
            with Display(self.progress) as self.display:
                if not is_loopback(self.host):
                    self.display.say(f"others join at {self.server.address}: fairseq-async join --help")
                for worker in self.processes.workers:
                    self._start(worker)
                self._watch()
            self.display.say(f"finished: {self.progress.summary()}")
        finally:
            self.processes.end()
            self.server.stop()

    @property
    def _address(self) -> str:
        """Where the workers on this machine find the server: in shared memory, if it listens there too."""
        return self.server.address.replace("0.0.0.0:", f"{LOOPBACK}:")

    def _start(self, worker: Worker) -> None:
        worker.updates_at_start = self.progress.updates[worker.id]
        variables = {
            TOKEN: self.server.token,
            WORKER: str(worker.id),
            WORKERS: str(len(self.processes.workers)),
            SLOWDOWN: str(self.slowdown[worker.id]),
        }
        self.processes.start(worker, self._address, variables)

    def _watch(self) -> None:
        while self.processes.running:
            time.sleep(0.2)
            self.display.refresh()
            ended = self.server.poll()
            if ended is not None:
                return self._after_server(ended)
            for worker in self.processes.failed:
                self._after_death(worker)
        self.display.refresh()
        self.progress.poll()
        if not any(self.progress.updates.values()):  # nothing was left to do, or nothing was done: the server knows
            self.server.join(_FINISHING)
            if self.server.poll() != 0:
                log = self.command.run_dir / "logs" / "worker-0.log"
                raise RunFailedError(f"the workers ended without having trained anything; log: {log}")

    def _after_death(self, worker: Worker) -> None:
        code = worker.process.returncode
        self.progress.poll()
        hopeless = code > 0 and self.progress.updates[worker.id] == worker.updates_at_start
        if code == _USER_ERROR or hopeless or worker.restarts >= self.max_restarts:
            raise RunFailedError(self.processes.epitaph(worker))
        worker.restarts += 1
        self.display.say(f"worker {worker.id} {manner(code)}; start {worker.restarts} of {self.max_restarts} again")
        self._start(worker)

    def _after_server(self, code: int) -> None:
        """The server ends first in a finished run too: workers have said goodbye by then."""
        self.display.refresh()
        if code != 0:
            raise RunFailedError(f"the server {manner(code)}; log: {self.command.run_dir / 'logs' / 'server.log'}")
        self.processes.wait(_FINISHING, [0])
        self.processes.wait(_LEAVING)
        for worker in self.processes.workers:
            if worker.process.poll() is None:
                self.display.say(f"worker {worker.id} did not end with the run, and is killed")
            if worker.process.poll() != 0 and (worker.id == 0 or worker.process.returncode == _USER_ERROR):
                raise RunFailedError(self.processes.epitaph(worker))
