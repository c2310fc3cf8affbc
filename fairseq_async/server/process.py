"""The server as a process: its loop, and how a launcher or worker 0 starts it and follows it to its end."""

import argparse
import fcntl
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange import Channel, environment
from fairseq_async.server.client import LOOPBACK
from fairseq_async.server.service import Build, Peer, Service

TOKEN = "FAIRSEQ_ASYNC_TOKEN"  # the environment, unlike a command line, is not for other users to read
_LATE = 20.0  # seconds that a finished server stays for workers that have not come yet


def serve(build: Build, arguments: Sequence[str] | None = None) -> None:
    """Runs a server: reports its address, answers until the run is finished or whoever started it is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=int, required=True, help="descriptor for the address, or an error")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    with open(options.report, "w") as report:  # not stdout, where an imported library may write too
        try:
            _claim(options.run_dir)
            listener = _listen(options.host, options.port)
        except ConfigurationError as error:
            report.write(f"error: {error}\n")
            raise SystemExit(2) from error
        service = Service(os.environ[TOKEN], options.workers, options.run_dir, build)
        report.write(f"{options.host}:{listener.getsockname()[1]}\n")
    _loop(listener, service)


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


def _loop(listener: socket.socket, service: Service) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)  # closes when the process that started us ends
    peers: list[Peer] = []
    finished_at = None
    while True:
        for key, ready in selector.select(timeout=service.tick()):
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                peer = Peer(Channel(listener.accept()[0]))
                selector.register(peer.channel.connection, selectors.EVENT_READ, peer)
                peers.append(peer)
            elif not _serve_peer(service, key.data, ready):
                selector.unregister(key.fileobj)
                peers.remove(key.data)
        for peer in peers:  # who does not take an answer at once is asked again when he can
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.busy else 0)
            if events != selector.get_key(peer.channel.connection).events:
                selector.modify(peer.channel.connection, events, peer)
        if service.finished:
            finished_at = finished_at or time.monotonic()
            late = len(service.joined) < service.workers and time.monotonic() < finished_at + _LATE
            if not peers and not late:
                return


def _serve_peer(service: Service, peer: Peer, ready: int) -> bool:
    """False when the connection is closed."""
    try:
        if ready & selectors.EVENT_WRITE:
            peer.channel.flush()
        for message in peer.channel.messages() if ready & selectors.EVENT_READ else []:
            service.receive(peer, message)
    except ExchangeError:
        service.forget(peer)
        peer.channel.close()
        return False
    return True


class ServerProcess:
    """A server started by this process, which it does not outlive.

    Args:
        module: the module whose ``__main__`` calls :func:`serve` with its own ``build``.
        log: the file for what the server prints.
        host: the address to listen on, for workers on other machines than this.

    Raises:
        ConfigurationError: the port is taken, or the server could not start.
    """

    def __init__(
        self, module: str, workers: int, run_dir: Path, log: Path, port: int = 0, host: str = LOOPBACK
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{run_dir} (--save-dir or --run-dir) cannot be made: {error.strerror}") from error
        self.token = secrets.token_hex(16)
        command = [sys.executable, "-m", module, "--workers", str(workers), "--run-dir", str(run_dir)]
        reader, writer = os.pipe()
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "--host", host, "--port", str(port), "--report", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
                env=os.environ | {TOKEN: self.token, "CUDA_VISIBLE_DEVICES": "", **_threads(workers), **environment()},
            )
        os.close(writer)
        with open(reader) as report:
            first = report.read().strip()
        if first.startswith("error: ") or not first:
            self.stop()
            raise ConfigurationError(first.removeprefix("error: ") or f"the server did not start; see {log}")
        self.address = first

    def wait(self, seconds: float) -> None:
        """Waits for the end of a finished run's server."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _threads(workers: int) -> dict[str, str]:
    """The optimizer may use the cores that the workers leave."""
    count = max(1, len(os.sched_getaffinity(0)) - workers)
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
