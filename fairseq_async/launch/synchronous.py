"""The ranks of one data-parallel group on this machine, from their start to their end."""

import json
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command import WorkerCommand
from fairseq_async.launch.launcher import _DYING, Launcher, RunFailedError, Worker, _interrupt, _wait
from fairseq_async.server.client import LOOPBACK

_LINE_EVERY = 10.0  # seconds between two lines of progress


class GroupLauncher(Launcher):
    """Starts ``workers`` times the same command as ranks 0, 1, … of one group; when one dies, the run is over.

    Raises:
        ConfigurationError: an option of asynchronous workers.
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
        if host != LOOPBACK or token_file:
            raise ConfigurationError("--host and --token-file: a synchronous method has no server; leave them out")
        if slowdown:
            raise ConfigurationError("--slowdown: ranks of a synchronous method wait for each other; leave it out")
        super().__init__(command, workers, slowdown, max_restarts, port)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, _interrupt)
        self.port = self.port or _free_port()
        self.workers[0].log.parent.mkdir(parents=True, exist_ok=True)
        try:
            for worker in self.workers:
                self._start(worker, "")
            self._watch()
            self._say(f"finished: {_progress(self.workers[0].log)}")
        finally:
            self._end_all()

    def _environment(self, worker: Worker) -> dict[str, str]:
        """What torchrun tells its processes."""
        variables = self._common_environment(worker)
        ranks = {"RANK": worker.id, "LOCAL_RANK": worker.id}
        size = {"WORLD_SIZE": len(self.workers), "LOCAL_WORLD_SIZE": len(self.workers)}
        if self._on_gpu():
            ranks["LOCAL_RANK"] = 0  # it sees one device
        address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": self.port}
        return variables | {name: str(value) for name, value in (ranks | size | address).items()}

    def _watch(self) -> None:
        line_at, running = time.monotonic() + _LINE_EVERY, True
        while running:
            time.sleep(0.2)
            running = any(worker.process.poll() is None for worker in self.workers)
            failed = [worker for worker in self.workers if worker.process.poll() not in (None, 0)]
            if failed:
                _wait(self.workers, _DYING)
                killed = [worker for worker in failed if worker.process.returncode < 0]
                raise RunFailedError(self._epitaph((killed or failed)[0]))
            if time.monotonic() >= line_at:
                line_at += _LINE_EVERY
                self._say(_progress(self.workers[0].log))

    def _say(self, text: str) -> None:
        Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


def _progress(log: Path) -> str:
    """What fairseq has written last of its training."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        _, found, record = line.partition("| train_inner | ")
        if found and record.startswith("{"):
            values = json.loads(record)
            known = [name for name in ("num_updates", "loss", "wps", "gain", "noise_scale") if name in values]
            return ", ".join(f"{name} {values[name]}" for name in known)
        if found:
            return record
    return "starting"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])
