"""Regions under a global server, all servers in threads of this process, with workers whose updates a test chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout, Push, PushReply, Report
from fairseq_async.regions.global_main import GlobalService
from fairseq_async.regions.regional_main import RegionalService
from fairseq_async.regions.upstream_link import UpstreamLink
from fairseq_async.server import ParameterServer
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer

LAYOUT = Layout.of([("w", torch.zeros(3)), ("b", torch.zeros(2))])
START = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.75])
TOKEN = "7e" * 16


class RegionServer(ThreadServer):
    """A region's server; ``told`` is what it has told whoever runs it."""

    def make_service(self, workers: int, run_dir: Path, build: Build) -> RegionalService:
        self.told: list[str] = []

        def connect(given: Any, spec: MethodSpec, layout: Layout, on_news: Callable[[], object]) -> UpstreamLink:
            own = int(self.address.rpartition(":")[2])
            return UpstreamLink(given, spec, layout, self.token, None, own, self.told.append, on_news)

        return RegionalService(self.token, workers, run_dir, build, self.told.append, connect)


def region_spec(upstream: str | None, workers: int = 1, record: bool = False, **options: Any) -> MethodSpec:
    """Of a region by delayed Nesterov; ``upstream`` None has no server above."""
    own: dict[str, Any] = {"outer": "delayed_nesterov", "outer_lr": 0.8, "delay": 4, "local_steps": 2}
    given = own | options | ({} if upstream is None else {"upstream": upstream})
    chosen = methods.parse(LocalSGDOptions, given, "test")
    return local_sgd_spec(chosen, workers, [], ServerOptions(record=record, worker_timeout=5.0), {})


class RegionWorker:
    """A worker of a region; worker 0 brings :data:`START`."""

    def __init__(self, server: ThreadServer, worker: int, spec: MethodSpec, start: Tensor = START) -> None:
        self.server, self.sequence, self.base = server, 0, 0
        self.client = Client(LastingConnection(server.address, server.token, worker, patience=20.0))
        welcome = self.client.join(LAYOUT, spec)
        if not welcome.initialised:
            self.client.slot.copy_(start)
            welcome = self.client.initialise(None)
        self.sequence = welcome.sequence

    def push(self, delta: Tensor) -> PushReply:
        report = Report({"seen": self.sequence}, local_steps=2, step_seconds=0.1)
        reply = self.client.push(lambda slot: slot.copy_(delta), Push(self.sequence, self.base, 2.0, report))
        self.sequence += 1
        return reply

    def pull(self) -> Tensor:
        values = torch.empty(LAYOUT.size)
        self.base = self.client.pull(values.copy_)
        return values


def parameter_server(server: ThreadServer) -> ParameterServer:
    return server.service.described.coordinator.server


class GlobalServer(ThreadServer):
    """A global server."""

    def make_service(self, workers: int, run_dir: Path, build: Build) -> GlobalService:
        return GlobalService(self.token, workers, run_dir, build)


@contextmanager
def global_server(
    run_dir: Path, regions: int = 2, host: str = "127.0.0.1", port: int = 0, resumes: bool = False
) -> Iterator[ThreadServer]:
    server = GlobalServer(regions, run_dir, host, local_sgd_main.build, token=TOKEN, port=port)
    server.service.resumes = resumes
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def region_server(run_dir: Path, workers: int = 1) -> Iterator[RegionServer]:
    with RegionServer(workers, run_dir, build=local_sgd_main.build, token=TOKEN) as server:
        yield server
