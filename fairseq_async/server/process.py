"""The server as a process: how a launcher or worker 0 starts it, starts it again, and follows it to its end."""

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange import environment
from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.server.client import LOOPBACK
from fairseq_async.server.loop import Loop
from fairseq_async.server.run import Build
from fairseq_async.server.service import Service

TOKEN = "FAIRSEQ_ASYNC_TOKEN"  # the environment, unlike a command line, is not for other users to read


def serve(build: Build, arguments: Sequence[str] | None = None) -> None:
    """Runs a server: reports its address, answers until the run is finished or whoever started it is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=int, required=True, help="descriptor for the address, or an error")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--recover", action="store_true", help="go on from the last snapshot in --run-dir")
    options = parser.parse_args(arguments)
    with open(options.report, "w") as report:  # not stdout, where an imported library may write too
        try:
            _claim(options.run_dir)
            service = Service(os.environ[TOKEN], options.workers, options.run_dir, build)
            said = _recover(service) if options.recover else ""
            listener = _listen(options.host, options.port)
        except ConfigurationError as error:
            report.write(f"error: {error}\n")
            raise SystemExit(2) from error
        report.write(f"{options.host}:{listener.getsockname()[1]} {said}\n")
    if Loop(listener, service, sys.stdin).run():
        service.snapshots.wait()
        service.snapshots.clear()  # a finished run goes on from its checkpoint, if at all


def _recover(service: Service) -> str:
    snapshot = service.recover()
    if snapshot is None:
        raise ConfigurationError(f"there is no snapshot in {service.snapshots.directory} to go on from")
    return snapshot


def _claim(run_dir: Path) -> None:
    """Keeps two runs out of one directory, for as long as this process lives."""
    try:
        fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigurationError(f"{run_dir} (--save-dir or --run-dir) is in use by another run") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        where = f"port {port} (--port)" if host == LOOPBACK else f"address {host}:{port} (--server)"
        raise ConfigurationError(f"{where} cannot be used: {error}") from error


class ServerProcess:
    """A server started by this process, which it does not outlive; started again from its last snapshot if it dies.

    Args:
        module: the module whose ``__main__`` calls :func:`serve` with its own ``build``.
        log: the file for what the server prints.
        host: the address to listen on, for workers on other machines than this.
        token: what its workers must know; a new one by default.
        restarts: how often it is started again.

    Attributes:
        token_file: where the owner's other processes on this machine find the token.

    Raises:
        ConfigurationError: the port is taken, or the server could not start.
    """

    def __init__(
        self,
        module: str,
        workers: int,
        run_dir: Path,
        log: Path,
        port: int = 0,
        host: str = LOOPBACK,
        token: str | None = None,
        restarts: int = 0,
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{run_dir} (--save-dir or --run-dir) cannot be made: {error.strerror}") from error
        self.token, self.log, self.restarts = token or new_token(), log, restarts
        self.token_file = run_dir / ".token"
        self._command = [sys.executable, "-m", module, "--workers", str(workers), "--run-dir", str(run_dir)]
        self._environment = os.environ | {TOKEN: self.token, "CUDA_VISIBLE_DEVICES": "", **_threads(workers)}
        self._code: int | None = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self.address, _ = self._start(["--host", host, "--port", str(port)])
        write_token(self.token_file, self.token)
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    def poll(self) -> int | None:
        """The exit code of a server that has ended and is not started again; else None."""
        return self._code

    def wait(self, seconds: float) -> None:
        """Waits for the end of a finished run's server."""
        self._supervisor.join(seconds)
        self.stop()

    def stop(self) -> None:
        with self._starting:
            self._stopping.set()
            self.process.kill()
        self.process.wait()
        self.token_file.unlink(missing_ok=True)

    def _start(self, arguments: list[str]) -> tuple[str, str]:
        """The server's address, and the snapshot that it goes on from."""
        reader, writer = os.pipe()
        with self.log.open("a") as output, self._starting:
            if self._stopping.is_set():
                raise ConfigurationError("the server was stopped")
            self.process = subprocess.Popen(
                [*self._command, *arguments, "--report", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
                env=self._environment | environment(),
            )
        os.close(writer)
        with open(reader) as report:
            first = report.read().strip()
        if first.startswith("error: ") or not first:
            self.process.kill()
            self.process.wait()
            raise ConfigurationError(first.removeprefix("error: ") or f"the server did not start; see {self.log}")
        address, _, snapshot = first.partition(" ")
        return address, snapshot

    def _supervise(self) -> None:
        """In a thread: starts the server again when it dies, at the same address, for workers that wait for it."""
        while (code := self.process.wait()) != 0 and not self._stopping.is_set() and self.restarts > 0:
            self.restarts -= 1
            host, _, port = self.address.rpartition(":")
            try:
                _, snapshot = self._start(["--host", host, "--port", port, "--recover"])
            except ConfigurationError as error:
                if self._stopping.is_set():
                    break
                _say(f"the server {manner(code)}, and cannot be started again: {error}")
                break
            _say(f"the server {manner(code)}, and was started again from {snapshot}")
        self._code = code


def manner(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "did not end"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _say(what: str) -> None:
    print(f"fairseq-async: {what}", file=sys.stderr, flush=True)


def _threads(workers: int) -> dict[str, str]:
    """The optimizer may use the cores that the workers leave."""
    count = max(1, len(os.sched_getaffinity(0)) - workers)
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
