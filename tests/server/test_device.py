"""A server whose parameters and slots are on its workers' GPU, here a fake one: as a server on the CPU, to the bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError
from fairseq_async.exchange import GpuMemory
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Push, Report, Welcome
from fairseq_async.records.state_files import moved
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.slots import allocate_memory
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.connection.server_connection import JoinDetails
from fairseq_async.worker.connection.worker_memory import WorkerMemory
from scripts.faults import sgd_server
from scripts.faults.sgd_server import sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.fake_ipc import NAME, FakeIpc, models_on_it
from tests.helpers.server_client import LAYOUT

ROUNDS = 3
Case = tuple[Build, MethodSpec]


@pytest.fixture
def ipc() -> Iterator[FakeIpc]:
    with models_on_it() as ipc:
        yield ipc


def hybrid(device: str, **changes: Any) -> Case:
    return sgd_server.build, sgd_spec(server_device=device, **changes)


def local_sgd(device: str, **options: Any) -> Case:
    given = methods.parse(LocalSGDOptions, {"total_steps": 0} | options, "test")
    return local_sgd_main.build, local_sgd_spec(given, 2, [], ServerOptions(server_device=device), {})


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a gradient a step": (hybrid, {}),
    "two gradients a step": (hybrid, {"updates_per_step": 2}),
    "compressed gradients": (hybrid, {"compress": {"push": "int8"}}),
    "look-ahead": (hybrid, {"look_ahead": None}),
    "outer SGD": (local_sgd, {"outer": "sgd"}),
    "delayed Nesterov": (local_sgd, {"outer": "delayed_nesterov", "delay": 2}),
    "fragments": (local_sgd, {"outer": "sgd", "fragments": 2, "local_steps": 2}),
    "compressed both ways": (local_sgd, {"outer": "sgd", "compress": "push=int8,pull=bf16"}),
}


class Workers:
    """Two workers of one server, which exchange in turn."""

    def __init__(self, case: Case, run_dir: Path, gpus: tuple[str, str] = (NAME, NAME)) -> None:
        self.build, self.spec = case
        self.server = ThreadServer(2, run_dir, build=self.build)
        self.clients = [
            Client(LastingConnection(self.server.address, self.server.token, worker, patience=20.0))
            for worker in range(2)
        ]
        for client, gpu in zip(self.clients, gpus, strict=True):
            if not client.join(LAYOUT, self.spec, JoinDetails(gpu=gpu)).initialised:
                client.slot.copy_(torch.linspace(-1, 1, LAYOUT.size))
                client.initialise(None)

    def exchange(self, rounds: int = ROUNDS) -> list[list[float]]:
        """What the workers get, after each of their updates."""
        got, values = [], torch.zeros(LAYOUT.size)
        fragments = self.spec.fragments
        for number in range(rounds * len(self.clients)):
            sequence, client = number // 2, self.clients[number % 2]
            delta = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(number)) / 8

            def write(slot: Tensor, delta: Tensor = delta) -> None:
                slot.copy_(delta)

            version = self.version(client, values)
            report = Report(local_steps=1, step_seconds=0.0, tokens=3.0)
            client.push(write, Push(sequence, version, 3.0, report, pulls=True))
            of = sequence if fragments > 1 else None
            client.pull(values.copy_, 1.5 if self.spec.look_ahead is None else 0.0, starts=True, fragment_of=of)
            got.append(values.tolist())
            self.version(client, values)
            got.append(values.tolist())
        return got

    def version(self, client: Client, values: Tensor) -> int:
        return client.pull(values.copy_)

    def stop(self) -> None:
        for client in self.clients:
            client.connection.close()
        self.server.stop()


def got_by(case: Case, run_dir: Path, gpus: tuple[str, str] = (NAME, NAME)) -> list[list[float]]:
    workers = Workers(case, run_dir, gpus)
    try:
        on_gpu = isinstance(workers.server.service.described.slots.memory, GpuMemory)
        assert on_gpu == (workers.spec.server.server_device == "cuda")
        return workers.exchange()
    finally:
        workers.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_server_on_the_gpu_does_as_one_on_the_cpu(ipc: FakeIpc, tmp_path: Path, name: str) -> None:
    """On the fake one, a side sees what the other has written only if that one has waited before its message."""
    make, options = CASES[name]
    on_cpu = got_by(make("cpu", **options), tmp_path / "cpu")
    assert not ipc.waits
    assert got_by(make("cuda", **options), tmp_path / "gpu") == on_cpu
    assert ipc.waits and on_cpu[0] != on_cpu[-1]
    for apart in (("GPU-fake", ""), ("GPU-fake", "GPU-fake")):
        ipc.unmapped = "" if "" in apart else "another container"
        assert got_by(make("cuda", **options), tmp_path / f"apart {ipc.unmapped}", apart) == on_cpu, "behind messages"


def test_an_update_goes_to_the_slot_of_a_server_that_comes_back(ipc: FakeIpc) -> None:
    """The slot before is lost with the server that has died."""
    memory, servers = WorkerMemory(remote=False), []
    for value in (2.0, 3.0):
        servers.append(GpuMemory.create(4, 1, True, torch.device("cpu")))
        servers[-1].allocate_slot(0)
        memory.place(Welcome(True, servers[-1].path, True, 1, on_gpu=servers[-1].shared(0)), 0, 4)
        memory.slot[:2] = value
        assert memory.send(memory.slot[1:]) is None
        for vector in ipc.vectors[:-2]:
            vector.of_server.fill_(torch.nan)
            vector.mapped.fill_(torch.nan)
    servers[1].publish(torch.ones(4), 1)
    waits = ipc.waits
    assert memory.published is not None and memory.published.read(memory.slot.copy_) == 1
    assert ipc.waits == waits + 1, "the seqlock is read when the copy is made"
    assert servers[1].slot(0).tolist() == [0.0, 3.0, 0.0, 0.0] and memory.slot.tolist() == [1.0] * 4


def test_a_snapshot_is_in_memory_and_names_the_gpu(ipc: FakeIpc, tmp_path: Path) -> None:
    """The process that writes it is a fork, which must not use the GPU; the next server finds it by this name."""
    workers = Workers(hybrid("cuda"), tmp_path)
    try:
        workers.exchange(1)
        state = workers.server.service.described.snapshot()
    finally:
        workers.stop()
    with ThreadServer(2, tmp_path / "later", build=sgd_server.build) as later:
        later.service.snapshots.latest = lambda *_: (Path("version-2.pt"), state)  # type: ignore[method-assign]
        later.service.recover()
        run = later.service.described
        assert isinstance(run.slots.memory, GpuMemory) and state["gpu"] == NAME
        assert run.coordinator.server.parameters.tolist() == state["server"]["parameters"].tolist()


def test_a_state_is_moved_as_it_is() -> None:
    state = {"a": [torch.ones(2), {"b": (torch.zeros(1), 3)}], "c": None}
    there = moved(state, torch.device("meta"))
    assert there["a"][0].is_meta and there["a"][1]["b"][0].is_meta and there["a"][1]["b"][1] == 3  # type: ignore[index]
    assert there["c"] is None and moved(state, torch.device("cpu"))["a"][0] is state["a"][0]  # type: ignore[index]


def test_a_gpu_has_room_where_all_slots_fit_beside_the_servers_own(ipc: FakeIpc) -> None:
    """A slot for each worker, and published parameters, own ones, the accumulator, two moments, the last step."""
    device = torch.device("cpu")
    ipc.free = 4 * 10 * (6 + 3)
    GpuMemory.create(10, 3, True, device)
    ipc.free -= 1
    with pytest.raises(ExchangeError, match="no room on the GPU"):
        GpuMemory.create(10, 3, True, device)


def test_a_gpu_without_room_is_one_line_before_training(ipc: FakeIpc, tmp_path: Path) -> None:
    ipc.free = 100
    with pytest.raises(RefusedError, match="no room on the GPU for the server: .*give --server-device cpu"):
        Workers(hybrid("cuda"), tmp_path)


@pytest.mark.parametrize(
    ("gpu", "free", "why"),
    [
        ("", 1 << 40, "the model of worker 0 is not on a GPU"),
        (NAME, 100, "no room on the GPU"),
        ("GPU-other", 1 << 40, "does not see GPU-other"),
        (NAME, 1 << 40, "the server is on the GPU of worker 0's model"),
    ],
)
def test_auto_takes_the_gpu_where_it_can_and_says_why(
    ipc: FakeIpc, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, free: int, why: str
) -> None:
    ipc.free = free
    workers = Workers(hybrid("auto"), tmp_path, (gpu, gpu))
    workers.stop()
    assert why in capsys.readouterr().err


def test_shards_and_a_recording_are_refused_with_it() -> None:
    for name, options in {"server_shards": {"server_shards": "2"}, "record": {"record": True}}.items():
        with pytest.raises(ConfigurationError, match=f"{name.replace('_', '.')} does not go with"):
            given = methods.parse(LocalSGDOptions, {}, "test")
            local_sgd_spec(given, 2, [], ServerOptions(server_device="cuda", **options), {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: hybrid("auto", server_shards=2),
        lambda: hybrid("auto", record=True),
        lambda: local_sgd("auto", upstream="10.0.0.1:1,region=0"),
    ],
    ids=["shards", "recording", "region"],
)
def test_a_server_of_shards_with_a_recording_or_of_a_region_is_on_the_cpu_where_it_may_choose(
    ipc: FakeIpc, make: Callable[[], Case]
) -> None:
    said, (_, spec) = list[str](), make()
    assert not isinstance(allocate_memory(spec, 4, 1, True, NAME, said.append), GpuMemory)
    assert said == ["the server is on the CPU: shards, a global server and recordings are for servers on the CPU"]


def test_a_server_that_publishes_nothing_has_no_memory_for_it(ipc: FakeIpc) -> None:
    assert GpuMemory.create(4, 1, False, torch.device("cpu"))._vectors[-1].numel() == 0
