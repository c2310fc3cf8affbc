"""The named actor of a shard of the server: it runs ``fairseq-async shard`` on its node, and starts it again."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from fairseq_async.errors import USER_ERROR
from fairseq_async.exchange.authentication import write_token
from fairseq_async.launch.error_lines import last_words
from fairseq_async.launch.ray import exec_with_parent
from fairseq_async.launch.ray.registry import Ended, NodeAddress
from fairseq_async.options.addresses import ANY, free_port
from fairseq_async.worker.start.server_process import manner, python_module

_PAUSE = 0.5  # seconds between two looks at the process


@dataclass(frozen=True)
class ShardTask:
    """The shard that an actor holds.

    Attributes:
        number: number of the shard; shard 0 is the server's own.
        restarts: how often the actor starts the process again.
        tls: directory of the run's certificates, the same on every node; None for plain connections.
        log: the file for the output of the process.
    """

    number: int
    restarts: int
    tls: Path | None
    log: Path


class RayShard:
    """Holds a shard of the server on the node where Ray has placed it.

    When Ray runs the constructor again on the same node, the shard has the address that server and workers know; the
    server then builds it again, from the newest snapshot.

    Args:
        run: name of the run's registry.
    """

    def __init__(self, run: str, task: ShardTask) -> None:
        registry = ray.get_actor(run)  # by name: see RayServer
        host = ray.util.get_node_ip_address()
        before: NodeAddress | None = ray.get(registry.place_of_shard.remote(task.number))
        self._task = task
        self._port = before.port if before is not None and before.host == host else free_port(ANY)
        self._directory = tempfile.TemporaryDirectory(prefix="fairseq-async-")
        self._token_file = Path(self._directory.name) / "token"
        write_token(self._token_file, ray.get(registry.token.remote()))
        ray.get(registry.record_shard.remote(task.number, NodeAddress(host, self._port)))

    def run(self) -> Ended:
        """Runs until the run is finished. Runs in the main thread: the kernel ends the process together with it."""
        restarts, log = self._task.restarts, self._task.log
        while True:
            start = log.stat().st_size if log.exists() else 0
            code = self._run_once()
            if code in (0, USER_ERROR) or restarts == 0:
                said = "" if code == 0 else f"shard {self._task.number} {manner(code)}: {last_words(log, start)}"
                return Ended(code, said)
            restarts -= 1

    def _run_once(self) -> int:
        self._task.log.parent.mkdir(parents=True, exist_ok=True)
        line = [*python_module("fairseq_async"), "shard", f"{ANY}:{self._port}", "--token-file", str(self._token_file)]
        line += [] if self._task.tls is None else ["--tls", str(self._task.tls)]
        begin = [sys.executable, exec_with_parent.__file__, str(os.getpid())]
        with self._task.log.open("a") as output:
            child = subprocess.Popen(
                [*begin, *line], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        while child.poll() is None:
            time.sleep(_PAUSE)
        return child.returncode
