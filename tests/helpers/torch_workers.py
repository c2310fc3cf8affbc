"""Workers of ``fairseq_async.torch`` in threads of this process, with a server in another thread."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from fairseq_async.environment import SERVER, TOKEN
from fairseq_async.server.plan import Build
from fairseq_async.worker.start.context import WorkerContext
from scripts.faults.thread_server import ThreadServer

_Result = TypeVar("_Result")


class ThreadWorkers:
    """Runs a function as each worker of a run.

    Args:
        build: of the server.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, workers: int, build: Build) -> None:
        self.workers, self._here = workers, threading.local()
        self.server = ThreadServer(workers, run_dir, build=build)
        monkeypatch.setenv(SERVER, self.server.address)
        monkeypatch.setenv(TOKEN, self.server.token)
        monkeypatch.setattr(WorkerContext, "find", lambda: WorkerContext(self._here.worker, workers))

    def run(self, train: Callable[[int], _Result]) -> list[_Result]:
        """What ``train(worker)`` gives, for each worker, after all have ended."""
        results: dict[int, _Result] = {}

        def work(worker: int) -> None:
            self._here.worker = worker
            results[worker] = train(worker)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == self.workers, "a worker has failed, or hangs"
        return [results[worker] for worker in range(self.workers)]
