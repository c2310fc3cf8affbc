"""Rules of local SGD that look ahead, or average a round: what a real server has recorded is repeated to the bit."""

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import Rule
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.replay.replay import Recording, Replay
from fairseq_async.reporting.audit import audit
from fairseq_async.server.plan import Plan
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.shards.build import close_shards
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.sharded import TOKEN, ShardHosts, shard_hosts


class CuttingRelay:
    """Relays connections to a process of this machine; a worker's is cut after a random number of bytes.

    The server's connection stays: without it the server would have to go back to a snapshot.

    Args:
        most: largest number of bytes, of both directions together, after which a connection is cut.

    Attributes:
        cuts: how many connections were cut.
    """

    def __init__(self, target: str, most: int, seed: int) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._most, self._random = (host, int(port)), most, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outside, _ = self._listener.accept()
                inside = socket.create_connection(self._target)
                _Relayed(self, outside, inside, self._random.randrange(self._most)).start()


class _Relayed:
    """One connection, and how many bytes are left until it is cut."""

    def __init__(self, relay: CuttingRelay, outside: socket.socket, inside: socket.socket, left: int) -> None:
        self._relay, self._ends, self._left = relay, (outside, inside), left
        self._lock = threading.Lock()
        self._of_worker = False

    def start(self) -> None:
        for source, target in (self._ends, self._ends[::-1]):
            threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 12):
                if b'"introduce"' in data and b'"worker":null' not in data:
                    self._of_worker = True
                with self._lock:
                    passed = data[: max(0, self._left)] if self._of_worker else data
                    self._left -= len(passed) if self._of_worker else 0
                target.sendall(passed)
                if len(passed) < len(data):
                    self._relay.cuts += 1
                    break
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


LAYOUT = Layout.of([("embed", torch.zeros(2)), ("w", torch.zeros(3))])
PULL = torch.tensor([[0.3, -0.2, 0.5, 0.1, -0.4], [-0.1, 0.4, 0.2, -0.3, 0.6]])  # where each worker pulls to


class LocalWorker:
    """One local step a round, to which the start counts."""

    layout = LAYOUT

    def __init__(self, worker: int, share: float | None) -> None:
        self.worker, self.share, self.sequence = worker, share, -1

    def start_from(self, parameters: Tensor, version: int) -> None:
        self.start, self.version = parameters.clone(), version

    def compute(self) -> tuple[Push, Tensor]:
        self.sequence += 1
        report = Report(
            {"seen": self.sequence}, local_steps=1, step_seconds=0.1, tokens=10.0 + self.worker, share=self.share
        )
        return Push(self.sequence, self.version, 1.0, report), 0.3 * self.start - PULL[self.worker]


class LocalRun:
    threads = 1
    shares: tuple[float | None, float | None] = None, None  # each worker's ranks over the mean number

    def __init__(self, spec: MethodSpec) -> None:
        self.spec, self.workers = spec, {worker: LocalWorker(worker, self.shares[worker]) for worker in (0, 1)}

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
        return local_sgd_main.build(spec, layout, parameters)


class Live:
    """The same workers with a real server."""

    def __init__(self, run_dir: Path, spec: MethodSpec, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.run = LocalRun(spec)
        self.server = ThreadServer(2, run_dir, host, build=local_sgd_main.build, token=token)
        self.clients = [
            Client(LastingConnection(self.server.address, self.server.token, worker, patience=30.0))
            for worker in (0, 1)
        ]
        for client in self.clients:
            if not client.join(LAYOUT, spec).initialised:
                client.slot.copy_(torch.arange(5.0))
                client.initialise(None)
        for worker in (0, 1):
            self.start(worker)

    def start(self, worker: int) -> None:
        values = torch.empty(LAYOUT.size)
        version = self.clients[worker].pull(values.copy_, starts=True)
        self.run.workers[worker].start_from(values, version)

    def push(self, worker: int) -> None:
        push, delta = self.run.workers[worker].compute()
        self.clients[worker].push(lambda slot: slot.copy_(delta), push)
        self.start(worker)


def one_by_one(live: Live) -> None:
    for worker in (0, 0, 1, 0, 1, 1, 0, 1):
        live.push(worker)


def in_rounds(live: Live) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(4):
            for each in [threads.submit(live.push, worker) for worker in (0, 1)]:
                each.result(30)


@pytest.mark.parametrize(
    ("options", "work"),
    [
        ({"outer": "mla"}, one_by_one),
        ({"outer": "heloco", "delay_compensation": 0.5}, one_by_one),
        ({"outer": "delayed_nesterov", "start_ahead": True}, one_by_one),
        ({"outer": "adamw"}, one_by_one),
        ({"outer": "nesterov", "staleness_power": -0.5}, one_by_one),
        ({"outer": "direction_averaging", "quorum": 2, "grace_period": 60.0}, in_rounds),
        ({"outer": "nesterov", "grace_period": 60.0, "staleness_power": -0.5}, in_rounds),
    ],
    ids=["MLA", "HeLoCo", "DN ahead", "AdamW", "weights", "direction averaging", "weights in rounds"],
)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.usefixtures("recipe_rules")
def test_each_version_of_the_replay_is_that_of_the_run(
    tmp_path: Path, options: dict[str, Any], work: Callable[[Live], None], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where worker 1 has three times as many ranks as worker 0."""
    monkeypatch.setattr(LocalRun, "shares", (0.5, 1.5))
    chosen = methods.parse(LocalSGDOptions, options, "test")
    spec = local_sgd_spec(chosen, 2, [], ServerOptions(record=True, server_shards=str(shards)), {})
    live = Live(tmp_path, spec)
    try:
        work(live)
        expected = live.server.service.described.coordinator.server.parameters.clone()
    finally:
        live.server.stop()
    with closing(Replay(Recording.read(tmp_path), LocalRun(spec))) as replay:
        versions = list(replay.steps())
    assert len(versions) == replay.compared >= 4
    assert torch.equal(replay.parameters, expected)


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardHosts]:
    with shard_hosts(tmp_path_factory.mktemp("host"), 1) as host:
        yield host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("outer", ["mla", "delayed_nesterov"])
def test_a_run_with_a_shard_on_another_machine_is_repeated_on_one(
    tmp_path: Path, outer: str, host: str, one_host: ShardHosts
) -> None:
    options: dict[str, Any] = {"outer": outer}
    given = ServerOptions(record=True, server_shards=one_host.option)
    spec = local_sgd_spec(methods.parse(LocalSGDOptions, options, "test"), 2, [], given, {})
    check_replay(tmp_path, spec, host, one_by_one)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def test_lines_to_a_shard_that_break_again_and_again_lose_and_double_nothing(
    tmp_path: Path, host: str, one_host: ShardHosts
) -> None:
    relay = CuttingRelay(one_host.addresses[0], most=3000, seed=1)  # an exchange takes some 600
    given = ServerOptions(record=True, server_shards=relay.address)
    spec = local_sgd_spec(methods.parse(LocalSGDOptions, {"outer": "mla"}, "test"), 2, [], given, {})

    def at_the_same_time(live: Live) -> None:
        with ThreadPoolExecutor() as threads:
            for each in [threads.submit(lambda its=w: [live.push(its) for _ in range(40)]) for w in (0, 1)]:
                each.result(60)

    try:
        check_replay(tmp_path, spec, host, at_the_same_time)
    finally:
        relay.close()
    assert relay.cuts > 10
    assert audit(tmp_path).applied == 80


def check_replay(directory: Path, spec: MethodSpec, host: str, work: Callable[[Live], None]) -> None:
    """Runs the workers with a server that has shards elsewhere; its replay on one machine must give the same bits."""
    live = Live(directory, spec, host, TOKEN)
    try:
        work(live)
        run = live.server.service.described
        server = run.coordinator.server
        assert server.parameters.numel() < LAYOUT.size
        expected = server.state_dict()["parameters"].clone()
    finally:
        for client in live.clients:
            client.close()
        close_shards(live.server.service.described.coordinator.server.rule)
        live.server.stop()
    with closing(Replay(Recording.read(directory), LocalRun(spec))) as replay:
        versions = list(replay.steps())
    assert len(versions) == replay.compared >= 4
    assert torch.equal(replay.parameters, expected)


def test_a_recording_that_says_nothing_of_it_weighs_a_round_as_it_was_weighed_then(tmp_path: Path) -> None:
    """Before, the updates of a round were as stale as when they arrived, all of them."""
    given = {"outer": "sgd", "outer_lr": 0.7, "grace_period": 60.0, "staleness_power": -0.5}
    chosen = methods.parse(LocalSGDOptions, given, "test")
    described = json.loads(json.dumps(local_sgd_spec(chosen, 2, [], ServerOptions(record=True), {}).to_json()))
    del described["counts_in_rounds"], described["quorum"]
    spec = MethodSpec.from_json(described)
    live = Live(tmp_path, spec)
    try:
        in_rounds(live)
        first = torch.arange(5.0) - 0.7 / 2 * (0.6 * torch.arange(5.0) - PULL.sum(0))
    finally:
        live.server.stop()
    replay = Replay(Recording.read(tmp_path), LocalRun(spec))
    steps = replay.steps()
    assert next(steps) == 2 and torch.allclose(replay.parameters, first)
    assert list(steps)[-1] == 8
