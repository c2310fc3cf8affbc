"""A server in a thread of this process: all of a server except its own process, started in milliseconds."""

import os
import socket
import threading
from pathlib import Path

from fairseq_async.exchange.authentication import new_token
from fairseq_async.exchange.tls import server_context
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.plan import Build
from fairseq_async.server.service import Service
from fairseq_async.server.shards.remote import HostConnector
from scripts.faults.sgd_server import build


class ThreadServer:
    """A server that serves until :meth:`stop`, which ends a ``with`` block too, or until its run is finished.

    Args:
        tls: directory of the server's certificates; None for connections without encryption.
        recovers: goes on from the newest snapshot, and takes others, for which it forks; for a process of its own.
    """

    def __init__(
        self,
        workers: int,
        run_dir: Path,
        host: str = "127.0.0.1",
        build: Build = build,
        tls: Path | None = None,
        token: str | None = None,
        port: int = 0,
        recovers: bool = False,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.token = token or new_token()
        listener = socket.create_server((host, port))
        self.service = self.make_service(workers, run_dir, build)
        self.service.reach = HostConnector(self.token, build.__module__, tls, print)
        if recovers:
            self.service.recover()
        else:
            self.service.snapshots.take = lambda state, version: None  # type: ignore[method-assign]  # no fork in pytest
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._lifeline, other = socket.socketpair()
        self._loop = EventLoop(listener, self.service, other, encryption=None if tls is None else server_context(tls))
        self._listener, self._other = listener, other
        self.thread = threading.Thread(target=self._loop.run, daemon=True)
        self.thread.start()

    def __enter__(self) -> "ThreadServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def make_service(self, workers: int, run_dir: Path, build: Build) -> Service:
        """Returns the service of an ordinary server."""
        return Service(self.token, workers, run_dir, build)

    def stop(self) -> None:
        self._lifeline.close()
        self.thread.join(10)
        assert not self.thread.is_alive()
        for peer in self._loop.peers:
            peer.channel.close()
        self._other.close()
        if self._listener.fileno() >= 0:  # it was not stopped before
            self._listener.close()
            close_files(self.service)


def close_files(service: Service) -> None:
    """Closes what a server's process keeps open until it ends, since this process has many servers."""
    if service.begun is not None:
        os.close(service.begun.events._file)
    if service.run is not None:
        service.run.slots.memory.close()
