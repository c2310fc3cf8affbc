"""A model of six tensors, methods for it, and a script, for servers in shards.

Hosts of shards are processes of this machine here.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fairseq_async.algorithms import Rule, Update, in_turn
from fairseq_async.exchange import SharedMemory
from fairseq_async.exchange.authentication import write_token
from fairseq_async.exchange.channel import Channel
from fairseq_async.method.methods import outer_rule
from fairseq_async.method.spec import MethodSpec, hybrid_spec
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout, PullReply
from fairseq_async.protocol.client_connection import Endpoint
from fairseq_async.protocol.division import exchanged, local_part
from fairseq_async.server.build import build_server
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.shards.build import build_sharded, close_shards, shared_copy
from fairseq_async.server.shards.remote import HostConnector, connect_hosts
from fairseq_async.worker.connection.shard_lines import ShardLines
from tests.helpers.commands import HELPERS, ROOT, Processes, command

SIZES = (7, 70_001, 33, 1, 65_537, 900)
LAYOUT = Layout.of([(f"t{number}", torch.zeros(size)) for number, size in enumerate(SIZES)])
ADAM = OptimizerSpec("Adam", [ParameterGroup([0, 1, 3], {"lr": 0.1}), ParameterGroup([2, 4, 5], {"lr": 0.02})])
MISSING = (0, 0, 0b011010, 0b010011, 0, 0b110000, 0b111111)  # tensors without a gradient; 1 and 4 in a whole step
OUTER: dict[str, dict[str, Any]] = {
    "diloco": {},
    "nesterov": {"start_ahead": True},
    "buffered_nesterov": {},
    "delayed_nesterov": {"start_ahead": True},
    "sgd": {},
    "mla": {},  # looks ahead by default, as the next one
    "heloco": {},
}

SCRIPT = """
import time
import torch
from fairseq_async.torch import HybridAsync

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
with METHOD as worker:
    torch.manual_seed(worker.worker)
    while not worker.finished:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        time.sleep(0.01)
if worker.worker == 0:
    torch.save(model(torch.eye(8)), "answers.pt")
"""


def options_of(outer: str) -> LocalSGDOptions:
    return outer_rule(outer).options(outer=outer, **OUTER[outer])


class Served:
    """A parameter server with two workers' slots; it ends with the block.

    Args:
        server: builds it, given its rule and the parameters of its machine.
        connector: reaches the hosts of shards; without one, as in a replay, their shards are processes here.
    """

    def __init__(
        self,
        build: Build,
        spec: MethodSpec,
        directory: Path,
        server: Callable[[Rule, Tensor], ParameterServer],
        connector: HostConnector | None = None,
        layout: Layout = LAYOUT,
    ) -> None:
        self.layout = layout
        self.memory = SharedMemory.create(self.layout.size, 2)
        whole = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(1))
        self.remote = [] if connector is None else connect_hosts(connector, spec, self.layout, whole)
        self.fragments = exchanged(spec, self.layout) if self.remote else self.layout.fragments(spec.fragments)
        self.here = local_part(spec, self.layout).elements if self.remote else slice(None)
        self.parameters = shared_copy(whole[self.here])
        self.rule: Rule
        if spec.server.shards > 1:
            shared = (self.parameters, self.memory.slot, directory)
            self.rule, self.plan = build_sharded(build, spec, self.layout, *shared, None, self.remote)
        else:
            self.rule, self.plan = build(spec, self.layout, self.parameters)
        self.server = server(self.rule, self.parameters)

    def push(self, first: int, count: int, change: Callable[[Tensor], object] = lambda delta: None) -> list[Any]:
        """So many updates, from both workers in turn; what their receipts say."""
        receipts = []
        for number in range(first, first + count):
            worker = number % 2
            slot = self.memory.slot(worker)
            slot.copy_(torch.randn(self.layout.size, generator=torch.Generator().manual_seed(100 + number)))
            change(slot)
            sequence = self.server.sequences.get(worker, -1) + 1
            self.place(worker, sequence)
            delta = in_turn(self.fragments, sequence).of(slot)
            update = Update(worker, sequence, 0, 1.0 + number, delta, missing=MISSING[number % 7])
            receipts += [self.server.push(update)]
        return receipts

    def place(self, worker: int, sequence: int) -> None:
        """Brings the hosts their parts of the update in the worker's slot, where there are hosts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_shards(self.rule)
        self.memory.close()


TOKEN = "0123456789abcdef0123456789abcdef"


PROGRAMS = {build: build.__module__ for build in (gradient_main.build, local_sgd_main.build)}


class ShardHosts:
    """Processes of ``fairseq-async shard``, which may be killed and started again."""

    def __init__(self, directory: Path, count: int, *flags: object) -> None:
        self.processes = Processes()
        self.token_file = directory / "token"
        write_token(self.token_file, TOKEN)
        self._flags = flags
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.running = [self._start(address) for address in self.addresses]

    @property
    def option(self) -> str:
        """The value of ``--shard-hosts``."""
        return ",".join(self.addresses)

    def kill(self, number: int) -> None:
        self.running[number].send_signal(signal.SIGKILL)
        self.running[number].wait(20)

    def start_again(self, number: int) -> None:
        self.running[number] = self._start(self.addresses[number])

    def _start(self, address: str):  # type: ignore[no-untyped-def]
        line = [command("fairseq-async"), "shard", address, "--token-file", self.token_file, *self._flags]
        return self.processes.start(line, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")


@contextmanager
def shard_hosts(directory: Path, count: int, *flags: object) -> Iterator[ShardHosts]:
    """So many hosts, whose token file is in the directory."""
    hosts = ShardHosts(directory, count, *flags)
    try:
        yield hosts
    finally:
        hosts.processes.end()


def server_options(addresses: list[str], shards: int = 1, **options: Any) -> ServerOptions:
    return ServerOptions(server_shards=",".join([str(shards), *addresses]), **options)


def hybrid(server: ServerOptions, inner: OptimizerSpec = ADAM, **options: Any) -> MethodSpec:
    return hybrid_spec(HybridOptions(**{"updates_per_step": 2} | options), 2, server, inner.to_json(), 0)


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


class ServedByHosts(Served):
    """A parameter server with two workers and its shards at the hosts; in a replay there are none."""

    def __init__(self, build: Build, spec: MethodSpec, directory: Path, replayed: bool = False) -> None:
        connector = None if replayed else HostConnector(TOKEN, PROGRAMS[build], None, print)
        super().__init__(build, spec, directory, partial(build_server, spec), connector)
        endpoint = Endpoint("", TOKEN, joins=False, instance="test")
        self.lines = [ShardLines(endpoint, worker, spec, LAYOUT) for worker in (0, 1) if self.remote]

    def place(self, worker: int, sequence: int) -> None:
        """Brings the hosts their parts of the update in the worker's slot; the message to the server goes nowhere."""
        if not self.lines:
            return
        here, there = connected()
        with here, there:
            self.lines[worker].send(sequence, self.memory.slot(worker), Channel(here), b"push", None)
            assert there.recv(100).endswith(b"push")

    def start(self, worker: int, look_ahead: float = 0.0, starts: bool = False) -> Tensor:
        """The parameters that a worker gets."""
        slot = self.memory.slot(worker)
        if self.lines:
            self.lines[worker].open(slot)
        number = self.server.give(worker, slot[self.here], look_ahead, starts)
        if self.lines:
            self.lines[worker].take(PullReply(self.server.version, number=number), slot)
        return slot.clone()

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()
        super().__exit__()
