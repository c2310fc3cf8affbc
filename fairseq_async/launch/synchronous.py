"""Runs the ranks of one data-parallel group on this machine, from their start to their end."""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.processes import Processes, Worker, failure, interrupt_on_signals
from fairseq_async.launch.progress.display import LINE_EVERY, plain_console, say
from fairseq_async.options.addresses import LOOPBACK, free_port
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.worker.start.run_directory import make_directories

_DYING = 10.0  # seconds for the other ranks to end by themselves after one has died
_STARTING = "starting"


class GroupLauncher:
    """Starts ``workers`` times the same command as ranks 0, 1, … of one group; when one dies, the run is over.

    Args:
        port: port at which the ranks meet (``MASTER_PORT``); 0 takes a free one.
    """

    def __init__(self, command: WorkerCommand, workers: int, port: int) -> None:
        self.processes, self.port = Processes(command, workers), port
        self._created = CreatedFiles(command.run_dir)

    def run(self) -> None:
        """Runs until the run is finished.

        Raises:
            ConfigurationError: the port is in use, or the run's directory cannot be made.
            RunFailedError: a rank failed; every process has been ended.
            KeyboardInterrupt: the run was interrupted; every process has been ended.
        """
        interrupt_on_signals()
        self.port = _checked(self.port) if self.port else free_port()
        make_directories(self.processes.command.run_dir, self.processes.workers[0].log.parent, "--save-dir")
        try:
            for worker in self.processes.workers:
                self.processes.start(worker, None, self._ranks(worker))
            self._watch()
            progress = self._progress()
            _say("finished" if progress == _STARTING else f"finished: {progress}")
        finally:
            self.processes.end()

    def _ranks(self, worker: Worker) -> dict[str, str]:
        """Returns the environment variables that torchrun would set for this rank."""
        size = str(len(self.processes.workers))
        return {
            "RANK": str(worker.id),
            "LOCAL_RANK": str(worker.id),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
        }

    def _watch(self) -> None:
        line_at = time.monotonic() + LINE_EVERY
        while self.processes.running:
            time.sleep(0.2)
            failed = self.processes.failed
            if failed:
                self.processes.wait(_DYING)
                killed = [worker for worker in failed if worker.process.returncode < 0]
                worker = (killed or failed)[0]
                error, code = self.processes.describe_end(worker), worker.process.returncode
                begun = self._progress() != _STARTING
                raise failure(error, code, worker.log, begun, self.processes.end, self._created)
            if time.monotonic() >= line_at:
                line_at += LINE_EVERY
                _say(self._progress())

    def _progress(self) -> str:
        return progress_in(self.processes.workers[0].log)


def _checked(port: int) -> int:
    """Returns the port. Raises a ConfigurationError if another program uses it: torch's own error has thirty lines."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise ConfigurationError(f"port {port} (--port) cannot be used: {error}; leave it out") from error
    return port


def _say(text: str) -> None:
    with suppress(OSError, SystemExit):  # the ranks do not depend on what somebody reads
        say(plain_console(stderr=True), text)


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()
    except OSError:
        return []


def progress_in(log: Path) -> str:
    """Returns the last progress of training that fairseq has logged; ``starting`` before any."""
    for line in reversed(_lines(log)):
        _, found, record = line.partition("| train_inner | ")
        if found and record.startswith("{"):
            try:
                values = json.loads(record)
            except ValueError:  # a line that fairseq is just writing
                continue
            known = [name for name in ("num_updates", "loss", "wps", "gain", "noise_scale") if name in values]
            return ", ".join(f"{name} {values[name]}" for name in known)
        if found:
            return record
    return _STARTING
