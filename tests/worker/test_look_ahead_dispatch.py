"""What a worker of local SGD is given where the rule looks ahead, with a server in a thread of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica
from scripts.faults.thread_server import ThreadServer

MLA = {"outer": "mla", "outer_lr": 0.5, "outer_momentum": 0.8, "local_steps": 2}
TARGETS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
INNER_LR = 0.1


class Worker:
    """SGD on |θ − target|²/2."""

    def __init__(self, server: ThreadServer, worker: int, options: LocalSGDOptions) -> None:
        self.theta, self.target = torch.zeros(3), TARGETS[worker]
        client = Client(LastingConnection(server.address, server.token, worker))
        self.local: LocalSGDWorker = local_sgd_worker(client, TensorReplica([("theta", self.theta)]), options)
        welcome = self.local.join(local_sgd_spec(options, 2, [], None, {}))
        self.local.begin(welcome if welcome.initialised else self.local.bring_parameters(None))

    def round(self) -> None:
        while not self.step():
            pass

    def step(self) -> bool:
        self.theta -= INNER_LR * (self.theta - self.target)
        return self.local.step(0.01)


@contextmanager
def run(run_dir: Path, **options: Any) -> Iterator[tuple[ThreadServer, list[Worker]]]:
    chosen = methods.parse(LocalSGDOptions, MLA | options, "test")
    with ThreadServer(2, run_dir, build=local_sgd_main.build) as server:
        yield server, [Worker(server, worker, chosen) for worker in range(2)]


def parameters(server: ThreadServer) -> Tensor:
    return server.service.described.coordinator.server.parameters.clone()


class Reference:
    """MLA in float64, and each worker's rounds of two local steps from what it was given."""

    def __init__(self, ahead: bool) -> None:
        self.ahead = ahead
        self.theta = self.m = torch.zeros(3, dtype=torch.float64)
        self.given = {0: self.theta, 1: self.theta}

    def round(self, worker: int) -> None:
        start = theta = self.given[worker]
        for _ in range(2):
            theta = theta - INNER_LR * (theta - TARGETS[worker])
        delta = start - theta
        self.m = 0.8 * self.m + 0.2 * delta
        self.theta = self.theta - 0.5 * (delta + 0.8 * self.m)
        self.given[worker] = self.theta - 0.5 * 0.8 * self.m * self.ahead


@pytest.mark.parametrize("ahead", [True, False])
def test_local_steps_start_ahead_and_pull_and_the_saved_state_are_the_parameters(tmp_path: Path, ahead: bool) -> None:
    with run(tmp_path, start_ahead=ahead) as (server, workers):
        reference = Reference(ahead)
        for worker in (0, 0, 1, 0, 1, 1, 0):
            workers[worker].round()
            reference.round(worker)
            assert torch.allclose(parameters(server).double(), reference.theta, atol=1e-6)
            assert torch.allclose(workers[worker].theta.double(), reference.given[worker], atol=1e-6)
        assert torch.equal(workers[0].theta, parameters(server)) == (not ahead)
        workers[0].local.client.save_state(str(tmp_path / "state.pt"))
        saved = torch.load(tmp_path / "state.pt", weights_only=True)["server"]["parameters"]
        assert torch.equal(saved, parameters(server))
        workers[0].local.pull()
        assert torch.equal(workers[0].theta, parameters(server))


def test_a_worker_that_comes_back_starts_ahead_too(tmp_path: Path) -> None:
    with run(tmp_path) as (server, workers):
        workers[0].round()
        workers[1].local.client.leave(finished=False)
        back = Worker(server, 1, methods.parse(LocalSGDOptions, MLA, "test"))
        assert torch.equal(back.theta, workers[0].theta)
        assert not torch.equal(back.theta, parameters(server))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_ends_with_the_parameters_themselves(tmp_path: Path, overlap: bool) -> None:
    with run(tmp_path, total_steps=6, overlap=overlap) as (server, (first, second)):
        second.local.client.leave(finished=False)
        while not first.local.finished:
            first.step()
        momentum = server.service.described.coordinator.server.rule.momentum_buffer
        assert momentum is not None and momentum.abs().max() > 0
        assert torch.equal(first.theta, parameters(server))


def test_delay_compensation_compares_with_what_the_worker_was_given(tmp_path: Path) -> None:
    """The first update has moved θ and m; the second worker was given zeros, and the third update starts ahead."""
    with run(tmp_path, delay_compensation=0.5, local_steps=1) as (server, workers):
        workers[0].round()
        given, now = workers[0].theta.clone(), parameters(server)
        assert not torch.equal(given, now)
        delta = INNER_LR * (given - workers[0].target)
        worth = delta + 0.5 * delta * delta * (now - given)
        momentum = server.service.described.coordinator.server.rule.momentum_buffer
        assert momentum is not None
        expected = now - 0.5 * (worth + 0.8 * (0.8 * momentum + 0.2 * worth))
        workers[0].round()
        assert torch.allclose(parameters(server), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer": "sgd", "start_ahead": "on"}, '"start_ahead" is of no use with "outer" sgd: leave it out'),
        ({"outer": "mla", "start_ahead": "sideways"}, '"start_ahead": Input should be a valid boolean.*sideways'),
        ({"outer": "mla", "delay": 2}, '"delay" is of no use with "outer" mla'),
    ],
)
def test_a_mistake_in_its_options_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        methods.parse(LocalSGDOptions, options, "file.json")
    assert "\n" not in str(caught.value)


def test_the_switch_is_on_or_off_in_words_too() -> None:
    for value in (False, "off", "false", 0):
        parsed = methods.parse(LocalSGDOptions, {"outer": "heloco", "start_ahead": value}, "file.json")
        assert parsed.model_dump()["start_ahead"] is False
