"""With any two options, a run is the same to the bit between machines, with a server in shards, and repeated from its
record, as on one machine with answers that are lost and a server that dies and goes on from its snapshot."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms import Rule
from fairseq_async.fairseq_plugin.replayed import RecordedClient
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout, Push
from fairseq_async.records.events import Event, read_events
from fairseq_async.replay.replay import Recording, Replay
from fairseq_async.server.kept_state import KeptState
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup
from fairseq_async.server.plan import Build, Plan
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.service import Service
from fairseq_async.server.shards.build import close_shards
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica
from scripts.faults.thread_server import ThreadServer
from tests.helpers.covering import covering
from tests.helpers.fragments import INNER_LR, LAYOUT, TARGETS
from tests.helpers.in_process import take_snapshot
from tests.helpers.mortal import InlineSnapshots
from tests.helpers.server_client import lose_next_answer

CODECS: dict[str, dict[str, Any]] = {
    "sparse updates": {"compress": "topk:chunk=3,keep=1"},
    "rounded starts": {"compress": "pull=int8:block=2"},
}
CHANGES = {"changes": {"compress": "pull=e3m0:block=2"}}
LOCAL_SGD: dict[str, dict[str, Any]] = CODECS | {
    "fragments": {"local_steps": 6, "fragments": 3, "fragment_delay": 1},
    "overlap": {"overlap": True},
    "weights": {"staleness_power": -0.5, "staleness_limit": 3},
    "compensation": {"delay_compensation": 0.5},
    "by speed": {"dynamic_local_steps": True},
    "ahead": {"start_ahead": True},
    "unequal ranks": {"shares": (0.5, 1.0, 1.5)},
}
HYBRID: dict[str, dict[str, Any]] = CODECS | {
    "two in a step": {"updates_per_step": 2},
    "missing gradients": {"missing": True},
    "Adam": {"optimizer": "Adam"},
}
MEASURED = {"as far ahead as measured": {"look_ahead": "auto"}}
TURNS = (0, 1, 2, 0, 0, 1, 0, 2, 0, 1, 0, 2, 2, 1, 0)
DEATH = 7  # of these, after which the server dies
TIMES = {"time", "server_seconds", "waiting_seconds", "computing_seconds", "push_seconds", "pull_seconds", "checksum"}


@dataclass(frozen=True)
class Job:
    """A run of three workers, whose parameters each of them pulls to another place.

    Attributes:
        shares: each worker's ranks over the mean number.
        missing: whether some gradients lack a tensor.
    """

    spec: Callable[[ServerOptions | None], MethodSpec]
    build: Build
    shares: Sequence[float] = (1.0, 1.0, 1.0)
    missing: bool = False


def local_sgd(given: dict[str, Any]) -> Job:
    shares = given.pop("shares", Job.shares)
    options = methods.parse(LocalSGDOptions, {"outer": "delayed_nesterov", "local_steps": 2} | given, "test")
    return Job(lambda server: local_sgd_spec(options, 3, [], server, {}), local_sgd_main.build, shares)


def hybrid(given: dict[str, Any]) -> Job:
    optimizer, missing = given.pop("optimizer", "SGD"), given.pop("missing", False)
    own = {"momentum": 0.9} if optimizer == "SGD" else {}
    groups = [ParameterGroup([0, 2], {"lr": 0.1, **own}), ParameterGroup([1], {"lr": 0.05, **own})]
    inner = OptimizerSpec(optimizer, groups).to_json()
    options = methods.parse(HybridOptions, {"updates_per_step": 1, "look_ahead": 0} | given, "test")
    return Job(lambda server: hybrid_spec(options, 3, server, inner, 0), gradient_main.build, missing=missing)


class Worker:
    """One of them; its parameters are ``theta``, flat."""

    layout = LAYOUT
    side: AsyncWorker

    def __init__(self, client: ServerConnection, job: Job, spec: MethodSpec) -> None:
        self.client, self.job, self.spec, self.theta = client, job, spec, torch.zeros(LAYOUT.size)
        views = zip(LAYOUT.segments, LAYOUT.views(self.theta), strict=True)
        named = [(segment.name, Parameter(view, requires_grad=False)) for segment, view in views]
        self.parameters = [parameter for _, parameter in named]
        if spec.method == "local_sgd":
            self.side = local_sgd_worker(client, TensorReplica(named), spec.local_sgd)
        else:
            self.side = HybridWorker(client, named)
        self.side.share = job.shares[client.worker]

    def begin(self) -> None:
        welcome = self.side.join(self.spec)
        self.side.begin(welcome if welcome.initialised else self.side.bring_parameters(None))

    def step(self) -> None:
        side, worker = self.side, self.client.worker
        number = side.step_number if isinstance(side, LocalSGDWorker) else side.sequence
        gradient = (1 + number % 3) * (self.theta - (1 + worker) * TARGETS[worker % 2])
        if isinstance(side, LocalSGDWorker):
            self.theta -= INNER_LR * gradient
            side.tokens += 5 + worker
            side.step(0.01 * (1 + worker), float(gradient[0]), {"seen": number})
            side.settle()
        elif isinstance(side, HybridWorker):
            for place, (parameter, part) in enumerate(zip(self.parameters, LAYOUT.views(gradient), strict=True)):
                parameter.grad = None if self.job.missing and (number + place) % 3 == 0 else part
            side.step(5.0 + worker, float(gradient[0]))


class Repeated(Worker):
    """The same in a replay."""

    client: RecordedClient

    def start_from(self, parameters: Tensor, version: int) -> None:
        self.client.parameters, self.client.version, self.client.pushed = parameters, version, None
        self.side.start_again() if self.side.joined else self.begin()

    def compute(self) -> tuple[Push, Tensor]:
        self.client.pushed = None
        while self.client.pushed is None:
            self.step()
        return self.client.pushed, self.client.update


class RepeatedRun:
    threads = 1

    def __init__(self, job: Job, spec: MethodSpec, events: Sequence[Event]) -> None:
        clients = [RecordedClient(worker, [each for each in events if each.worker == worker]) for worker in range(3)]
        self.workers = {client.worker: Repeated(client, job, spec) for client in clients}  # type: ignore[arg-type]
        self._build = job.build

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
        return self._build(spec, layout, parameters)


class Server(ThreadServer):
    """It writes its snapshots itself."""

    def make_service(self, workers: int, run_dir: Path, build: Build) -> Service:
        service = super().make_service(workers, run_dir, build)
        service.snapshots = InlineSnapshots(run_dir)
        service.state = KeptState(service.snapshots)
        return service


@contextmanager
def served(run_dir: Path, job: Job, host: str, **of_the_one_before: Any) -> Iterator[Server]:
    server = Server(3, run_dir, host, job.build, recovers=True, **of_the_one_before)
    try:
        yield server
    finally:
        if server.service.begun is not None:
            close_shards(server.service.begun.coordinator.server.rule)
        server.stop()


def run(
    run_dir: Path, job: Job, spec: MethodSpec, host: str, patch: pytest.MonkeyPatch | None = None
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The parameters of each worker after its turns, at last the server's; and all that was logged but for times.

    Args:
        patch: loses an answer of each worker, after the server has died.
    """
    with served(run_dir, job, host) as server:
        address, token = server.address, server.token
        workers = [Worker(Client(LastingConnection(address, token, w, patience=30.0)), job, spec) for w in range(3)]
        for worker in workers:
            worker.begin()
        seen = [after_turn(workers[number]) for number in TURNS[: DEATH if patch else None]]
        if patch is not None:
            take_snapshot(server.service)
        last = server.service.described.coordinator.server.parameters.clone()
    if patch is not None:
        with served(run_dir, job, host, port=int(address.rpartition(":")[2]), token=token) as server:
            for place, number in enumerate(TURNS[DEATH:]):
                if place == 3:
                    for worker in workers:
                        lose_next_answer(worker.side, patch)
                seen.append(after_turn(workers[number]))
            last = server.service.described.coordinator.server.parameters.clone()
    for worker in workers:
        worker.client.close()
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    settled = [line for line in lines if line["status"] != "duplicate"]
    return [*seen, last], [{key: value for key, value in line.items() if key not in TIMES} for line in settled]


def after_turn(worker: Worker) -> Tensor:
    """The worker's parameters after a turn, in which it sends an update."""
    before = worker.side.sequence
    while worker.side.sequence == before:
        worker.step()
    return worker.theta.clone()


JOBS = [*covering(local_sgd, LOCAL_SGD, CHANGES), *covering(hybrid, HYBRID, CHANGES | MEASURED)]


@pytest.mark.parametrize(("names", "job"), JOBS, ids=[", ".join(names) for names, _ in JOBS])
def test_a_run_is_the_same_however_it_goes(
    tmp_path: Path, names: list[str], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, there = job.spec(ServerOptions(server_shards="2", record=True)), tmp_path / "apart"
    parameters, lines = run(there, job, apart, "127.0.0.2")
    assert len({line["staleness"] for line in lines}) > 2
    # a server forgets what it has measured of a worker, and what it has sent to it, with the connection
    patch = None if {*CHANGES, *MEASURED} & {*names} else monkeypatch
    undisturbed = run(tmp_path / "here", job, job.spec(None), "127.0.0.1", patch)
    for number, (ours, theirs) in enumerate(zip(parameters, undisturbed[0], strict=True)):
        assert torch.equal(ours, theirs), f"after turn {number}"
    for line, expected in zip(lines, undisturbed[1], strict=True):
        about = {"cosine": pytest.approx(expected["cosine"], abs=1e-6)}  # shards sum it up in another order
        assert line == expected | about | {"bytes_received": line["bytes_received"]}
    repeated = RepeatedRun(job, apart, read_events(there / "events.jsonl"))
    with closing(Replay(Recording.read(there), repeated)) as replay:
        assert list(replay.steps())[-1] == replay.server.version
        assert torch.equal(replay.parameters, parameters[-1])
