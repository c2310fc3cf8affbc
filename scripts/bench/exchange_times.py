"""Times pushes and pulls, beside an all-reduce of the same bytes, and the parts of which they consist."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.algorithms import Update  # noqa: E402
from fairseq_async.exchange import SharedMemory, copy  # noqa: E402
from fairseq_async.exchange.linux import environment  # noqa: E402
from fairseq_async.fairseq_plugin.hybrid import HybridAsync  # noqa: E402
from fairseq_async.method.spec import MethodSpec  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from fairseq_async.protocol import Layout  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.sgd_server import build  # noqa: E402
from scripts.faults.sgd_server import sgd_spec  # noqa: E402

UPDATES_PER_STEP = 4
WARM_UP = 2  # first values of each list that do not count
PAUSE = 0.1  # seconds in place of a worker's computation between updates, in which the server may finish its work
TENSOR = 1 << 20  # elements of each of the model's tensors

Seconds = dict[str, list[float]]


def model(parameters: int) -> list[tuple[str, Parameter]]:
    """Returns named tensors with gradients, of about `parameters` elements together."""
    named = [(f"layer{i}", Parameter(torch.randn(1024, 1024))) for i in range(max(1, round(parameters / TENSOR)))]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return named


def join(client: Client, parameters: int, spec: MethodSpec) -> HybridAsync:
    """Returns a hybrid_async worker that has joined with this number of parameters, without a real model or data."""
    optimizer = HybridAsync(Namespace(lr=[1e-4]), model(parameters), client, None, False)
    welcome = optimizer.worker.join(spec)
    if not welcome.initialised:
        welcome = optimizer.worker.bring_parameters(None)
    optimizer.start_from(welcome)
    return optimizer


def clocked(work: Callable[[], Any]) -> float:
    """Returns the seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# Processes that take turns


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Adds the variables to the environment until the end of the block, for processes started in it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Player:
    """A process that does one thing whenever it is told to, and waits otherwise.

    Args:
        play: called in the process with its end of the connection, on which each True asks for one turn.
        variables: environment variables of the process, besides those of this one.
    """

    def __init__(self, play: Callable[..., None], *arguments: Any, variables: Mapping[str, str] | None = None) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=play, args=(other, *arguments), daemon=True)
        with environment_with(variables or {}):
            self.process.start()
        other.close()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def take_turn(*players: Player) -> Any:
    """Let the players take a turn at the same time; returns the answer of the first one."""
    time.sleep(PAUSE)
    for player in players:
        player.connection.send(True)
    return [player.connection.recv() for player in players][0]


def reduce(connection: Connection, index: int, port: int, size: int) -> None:
    """Play one of two ranks that reduce `size` numbers with Gloo; sends the seconds of each all-reduce."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=index, world_size=2, timeout=timedelta(seconds=120))
    zeros = torch.empty(size).fill_(0.0)
    while connection.recv():
        dist.barrier()
        connection.send(clocked(lambda: dist.all_reduce(zeros)))


def exchange(connection: Connection, parameters: int, address: str, token: str, out: Path) -> None:
    """Play a worker; sends the seconds of each push (with the copy into the slot) and pull, and whether it stepped."""
    torch.set_num_threads(1)
    optimizer = join(Client(LastingConnection(address, token, 0)), parameters, sgd_spec(UPDATES_PER_STEP, workers=1))
    worker, gradients = optimizer.worker, [parameter.grad for parameter in optimizer.params]
    while connection.recv():
        version = worker.version
        optimizer.zero_grad()
        optimizer.multiply_grads(1.0)  # writes nothing into the slot: there are no gradients yet
        for parameter, gradient in zip(optimizer.params, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        stepped = worker.version > version
        pull = worker.last["pull_seconds"] if stepped else clocked(worker.pull)
        connection.send((worker.last["push_seconds"], pull, stepped))


def whole(parameters: int, rounds: int, out: Path) -> Seconds:
    """Time all-reduces between two processes, and pushes and pulls between a worker and its server, in turn.

    The worker is hybrid_async itself, in the environment that the launcher gives it.
    """
    size, port = Layout.of(model(parameters)).size, free_port()
    os.environ["PYTHONPATH"] = f"{jobs.ROOT}:{os.environ.get('PYTHONPATH', '')}"
    server = ServerProcess("scripts.bench.sgd_server", 1, out, out / "server.log")
    worker = Player(exchange, parameters, server.address, server.token, out, variables=environment())
    ranks = [Player(reduce, index, port, size) for index in range(2)]
    seconds: Seconds = {name: [] for name in ("all-reduce", "push", "push that steps", "pull")}
    try:
        for _ in range(rounds):
            seconds["all-reduce"].append(take_turn(*ranks))
            push, pull, stepped = take_turn(worker)
            seconds["push that steps" if stepped else "push"].append(push)
            seconds["pull"].append(pull)
    finally:
        for player in (worker, *ranks):
            player.stop()
        server.stop()
    return seconds


# The parts


def parts(parameters: int, rounds: int) -> Seconds:
    """Time the parts of push and pull, one after the other in one process, on the same kind of memory."""
    spawn = torch.multiprocessing.get_context("spawn")
    with environment_with(environment()), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(one_by_one, parameters, rounds).result()


def one_by_one(parameters: int, rounds: int) -> Seconds:
    """Time the parts, in the process that has the environment for them."""
    torch.set_num_threads(1)
    named = model(parameters)
    layout = Layout.of(named)
    memory = SharedMemory.create(layout.size, 1)
    server = torch.cat([parameter.detach().flatten() for _, parameter in named])
    rule, _ = build(sgd_spec(updates_per_step=3), layout, server)
    slot, gradients = memory.slot(0), [parameter.grad for _, parameter in named if parameter.grad is not None]

    def write() -> None:
        for view, (_, parameter) in zip(layout.views(slot), named, strict=True):
            assert parameter.grad is not None
            copy(view, parameter.grad)

    def read(flat: torch.Tensor) -> None:
        for view, (_, parameter) in zip(layout.views(flat), named, strict=True):
            copy(parameter, view)

    def accumulate() -> None:
        rule.apply(server, Update(0, 0, 0, 1.0, slot))

    def scale(into: Iterable[torch.Tensor]) -> None:
        for (_, parameter), out in zip(named, into, strict=True):
            assert parameter.grad is not None
            torch.mul(parameter.grad, 0.999, out=out)

    steps: dict[str, Callable[[], Any]] = {
        "worker: divide the gradients in place": lambda: scale(gradients),
        "worker: divide them into the slot": lambda: scale(layout.views(slot)),
        "worker: write the slot": write,
        "server: norm": lambda: float(torch.linalg.vector_norm(slot)),
        "server: first into the accumulator": accumulate,
        "server: next into the accumulator": accumulate,
        "server: the same, and SGD": accumulate,
        "server: publish": lambda: memory.publish(server, 1),
        "worker: pull": lambda: memory.read(read),
    }
    seconds: Seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(clocked(step))
    memory.close()
    return seconds


def rows(seconds: Seconds) -> list[dict[str, Any]]:
    """Return milliseconds without the first rounds. The fastest value is the least disturbed by other processes."""
    counted = {name: [1000 * value for value in values[WARM_UP:] or values] for name, values in seconds.items()}
    return [
        {"what": name, "median ms": median(values), "fastest ms": min(values), "times": len(values)}
        for name, values in counted.items()
    ]
