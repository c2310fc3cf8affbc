"""The named actor of the server: when Ray runs its constructor again, on any node, it goes on from the newest
snapshot."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.ray.registry import Ended, NodeAddress, State
from fairseq_async.options.addresses import ANY
from fairseq_async.options.validation import split_address
from fairseq_async.protocol.notices import ENDED, SAVED
from fairseq_async.records.snapshots import Snapshots, snapshots_in
from fairseq_async.worker.start.rendezvous import ServerRequest
from fairseq_async.worker.start.server_process import ServerProcess

_LAST_ONES_END = 60.0  # seconds for which the server of a dead actor may still hold its port and directory
_PAUSE = 0.5  # seconds between two attempts


@dataclass(frozen=True)
class ServerTask:
    """The server that an actor runs.

    Attributes:
        request: the server's module and directories, as worker 0 asks for them.
        workers: number of workers that were announced.
        restarts: how often the actor starts the server's process again.
        resumes: whether to go on with an interrupted run in the same directory.
    """

    request: ServerRequest
    workers: int
    restarts: int
    resumes: bool


class RayServer:
    """Starts the server's process, and tells the registry where it listens.

    When the server's process dies, the updates since the last snapshot are lost, as without Ray. When the actor dies,
    its server still writes a last snapshot, if it can.

    Args:
        run: name of the run's registry.
    """

    def __init__(self, run: str, task: ServerTask) -> None:
        registry = ray.get_actor(run)  # by name: Ray stores a handle in an argument separately, and may lose it
        self._task, self._token = task, ray.get(registry.token.remote())
        self._error = ""
        state: State = ray.get(registry.state.remote())
        host = ray.util.get_node_ip_address()
        again = ray.get(registry.begin_server.remote())
        try:
            self._process = self._start_again(host, state.place) if again else self._start()
        except ConfigurationError as error:
            self._error = str(error)
            return
        if not (again or task.resumes):
            # the server does so too, but after an actor that dies before, its successor would take them for this run's
            Snapshots(Path(task.request.run_dir)).begin_anew()
        port = split_address(self._process.address)[1]
        ray.get(registry.record_server.remote(NodeAddress(host, port)))

    def follow(self) -> Ended:
        """Waits until the run is over, and returns how the server has ended; it may stay for a worker 0 that dies."""
        if self._error:
            return Ended(1, self._error)
        self._process.over.wait()
        return Ended(self._process.poll() or 0)

    def end(self, saved: bool) -> None:
        """Ends the server; see :meth:`ServerProcess.end`."""
        if not self._error:
            self._process.end(why=SAVED if saved else ENDED)

    def _start(self, port: int = 0, recovers: bool = False) -> ServerProcess:
        task, run_dir = self._task, Path(self._task.request.run_dir)
        tls = None if task.request.tls is None else Path(task.request.tls)
        return ServerProcess(
            task.request.module,
            task.workers,
            run_dir,
            run_dir / "logs" / "server.log",
            port,
            ANY,
            self._token,
            restarts=task.restarts,
            resumes=task.resumes,
            tls=tls,
            recovers=recovers,
            run_dir_option=task.request.run_dir_option,
            stays=True,
            standby=task.request.standby,
        )

    def _start_again(self, host: str, before: NodeAddress | None) -> ServerProcess:
        """Starts the server again: on the same node at the same port, where workers look for it; on another node at a
        free port, which the registry tells them."""
        recovers = bool(snapshots_in(Path(self._task.request.run_dir)))
        port = before.port if before is not None and before.host == host else 0
        start, deadline = partial(self._start, recovers=recovers), time.monotonic() + _LAST_ONES_END
        while time.monotonic() < deadline:
            try:
                return start(port)
            except ConfigurationError:
                time.sleep(_PAUSE)
        return start()
