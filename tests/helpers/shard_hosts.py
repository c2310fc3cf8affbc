"""Shards of a server that processes on other machines hold; here they are processes of this machine."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_async.exchange.authentication import write_token
from fairseq_async.exchange.channel import Channel
from fairseq_async.method.spec import MethodSpec, hybrid_spec
from fairseq_async.options.config import HybridOptions, ServerOptions
from fairseq_async.protocol import PullReply
from fairseq_async.protocol.client_connection import Endpoint
from fairseq_async.server.coordinator import build_server
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.shards.remote import HostConnector
from fairseq_async.worker.connection.shard_lines import ShardLines
from tests.helpers.commands import HELPERS, ROOT, Processes, command, free_port
from tests.helpers.sharded import ADAM, LAYOUT, Served

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
    return ServerOptions(server_shards=shards, shard_hosts=",".join(addresses), **options)


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
