"""Local SGD with a server in a thread, and workers whose updates a test chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fairseq_async.method import methods
from fairseq_async.method.spec import JsonObject, MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Layout, Push, PushReply, Report
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.worker.connection.client import Client
from scripts.faults.thread_server import ThreadServer

LAYOUT = Layout.of([("w", torch.zeros(3))])


class Worker:
    """Joins; worker 0 brings parameters that are zero, or a state in a file."""

    def __init__(self, server: ThreadServer, worker: int, spec: MethodSpec, state: Path | None = None) -> None:
        self.client = Client(server.address, server.token, worker)
        self.spec = spec
        self.welcome = self.client.join(LAYOUT, spec)
        if not self.welcome.initialised:
            self.client.slot.zero_()
            self.welcome = self.client.initialise(None if state is None else str(state))

    def push(
        self, sequence: int, value: float, base: int = 0, norm: float | None = None, position: JsonObject | None = None
    ) -> PushReply:
        """An update that adds ``value`` to each parameter where it is taken as it is."""
        report = Report(position, local_steps=1, step_seconds=0.0)
        return self.client.push(lambda slot: slot.fill_(-value), Push(sequence, base, 1.0, report, norm=norm))

    def pull(self) -> tuple[int, float]:
        values = torch.empty(LAYOUT.size)
        version = self.client.pull(values.copy_)
        assert values.min() == values.max()
        return version, values[0].item()


Enter = Callable[..., Worker]


@contextmanager
def local_sgd(run_dir: Path, workers: int = 2, host: str = "127.0.0.1", **options: Any) -> Iterator[list[Worker]]:
    """So many workers of a run whose server adds their updates up, at a rate of 1 each, and has these options."""
    own: dict[str, Any] = {"outer": "sgd", "outer_lr": float(workers), "total_steps": 0}
    spec = local_sgd_spec(methods.parse(LocalSGDOptions, own | options, "test"), workers, [], None, {})
    server = ThreadServer(workers, run_dir, host, outer.build)
    try:
        yield [Worker(server, worker, spec) for worker in range(workers)]
    finally:
        server.stop()
