"""Workers and servers in threads of this process."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.environment import SERVER, TOKEN
from fairseq_async.method import methods
from fairseq_async.method.spec import JsonObject, MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol import Assignment, Layout, Push, PushReply, Report, Welcome
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.start.context import WorkerContext
from scripts.faults.thread_server import ThreadServer


class HybridJob:
    """A worker with the parameters of the tests' layout, which are 1 at the server's start; its learning rate is 1."""

    def __init__(self, client: Client) -> None:
        self.weight, self.bias = Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))
        self.worker = HybridWorker(client, [("weight", self.weight), ("bias", self.bias)])
        assignment = Assignment(learning_rate=1.0)
        self.worker.begin(Welcome(True, "", publishes=True, slots=1, assignment=assignment))

    def backward(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight.grad, self.bias.grad = weight, bias

    def parameters(self) -> list[float]:
        return [*self.weight.detach().flatten().tolist(), *self.bias.detach().tolist()]


LAYOUT = Layout.of([("w", torch.zeros(3))])


class Worker:
    """Joins; worker 0 brings parameters that are zero, or a state in a file."""

    def __init__(self, server: ThreadServer, worker: int, spec: MethodSpec, state: Path | None = None) -> None:
        self.client = Client(LastingConnection(server.address, server.token, worker))
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
    with ThreadServer(workers, run_dir, host, outer.build) as server:
        yield [Worker(server, worker, spec) for worker in range(workers)]


_Result = TypeVar("_Result")


class _Hooks(OrderedDict[int, Any]):
    """The hooks before the steps of all optimizers, which one thread may change while another one calls them.

    torch keeps them for the whole process and calls them in a loop over ``values()``. A worker that leaves its block
    takes its hook out, which would end the loop of another thread's step with an error; workers in processes have hooks
    of their own.
    """

    def values(self) -> Any:
        return list(super().values())


class ThreadWorkers:
    """Runs a function as each worker of a run.

    Args:
        build: of the server.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, workers: int, build: Build) -> None:
        self.workers, self._here = workers, threading.local()
        self.server = ThreadServer(workers, run_dir, build=build)
        monkeypatch.chdir(run_dir)  # workers keep states for moments in a folder of the current one
        monkeypatch.setenv(SERVER, self.server.address)
        monkeypatch.setenv(TOKEN, self.server.token)
        monkeypatch.setattr(torch_optimizer, "_global_optimizer_pre_hooks", _Hooks())
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
