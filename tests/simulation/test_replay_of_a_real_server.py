"""What a real server has recorded is repeated with all the options by which it decided."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.replay.replay import Recording, Replay
from fairseq_async.server.plan import Plan
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers import halving
from tests.helpers.halving import LAYOUT, halving_spec


class AsyncWorker:
    """A worker whose gradients are half of what it starts from, and wrong at some of its numbers."""

    layout = LAYOUT

    def __init__(self, worker: int, wrong: Mapping[tuple[int, int], float]) -> None:
        self.worker, self.wrong, self.sequence = worker, wrong, -1

    def start_from(self, parameters: Tensor, version: int) -> None:
        self.start, self.version = parameters.clone(), version

    def compute(self) -> tuple[Push, Tensor]:
        self.sequence += 1
        report = Report(position={"seen": self.sequence})
        factor = self.wrong.get((self.worker, self.sequence), 0.5)
        return Push(self.sequence, self.version, 1.0 + self.worker, report), self.start * factor


class HalfRun:
    """Two of them."""

    threads = 1

    def __init__(self, spec: MethodSpec, wrong: Mapping[tuple[int, int], float]) -> None:
        self.spec = spec
        self.workers = {worker: AsyncWorker(worker, wrong) for worker in (0, 1)}

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Any, Plan]:
        return halving.build(spec, layout, parameters)


class Live:
    """The same workers with a real server."""

    def __init__(self, run_dir: Path, spec: MethodSpec, wrong: Mapping[tuple[int, int], float]) -> None:
        self.run = HalfRun(spec, wrong)
        self.server = ThreadServer(2, run_dir, build=halving.build)
        self.clients = [Client(LastingConnection(self.server.address, self.server.token, worker)) for worker in (0, 1)]
        for client in self.clients:
            if not client.join(LAYOUT, spec).initialised:
                client.slot.copy_(torch.tensor([1.0, -2.0, 3.0]))
                client.initialise(None)
        for worker in (0, 1):
            self.pull(worker)

    def pull(self, worker: int) -> None:
        values = torch.empty(LAYOUT.size)
        self.run.workers[worker].start_from(values, self.clients[worker].pull(values.copy_))
        self.run.workers[worker].start = values

    def push(self, worker: int, pulls: bool = True) -> str:
        """What became of its next update, after which it pulls."""
        push, gradient = self.run.workers[worker].compute()
        answer = self.clients[worker].push(lambda slot: slot.copy_(gradient), push)
        if pulls:
            self.pull(worker)
        return answer.status.value

    def ends_epoch(self) -> None:
        self.clients[0].schedule_event("end_epoch", 1, 1.0)


Work = Callable[[Live], None]


def repeated(run_dir: Path, work: Work, wrong: Mapping[tuple[int, int], float] | None = None, **changes: Any) -> Replay:
    """The replay, at its end, of what ``work`` lets two workers do."""
    spec = halving_spec(**{"updates_per_step": 1, "record": True} | changes)
    live = Live(run_dir, spec, wrong or {})
    try:
        work(live)
        expected = live.server.service.described.coordinator.server
    finally:
        live.server.stop()
    replay = Replay(Recording.read(run_dir), HalfRun(spec, wrong or {}))
    versions = list(replay.steps())
    assert versions[-1] == replay.server.version == expected.version and replay.compared == len(versions)
    assert torch.equal(replay.parameters, expected.parameters)
    return replay


def test_what_the_limit_of_norms_refused_is_refused_again(tmp_path: Path) -> None:
    def work(live: Live) -> None:
        assert {live.push(worker) for _ in range(11) for worker in (0, 1)} == {"applied"}
        assert [live.push(0), live.push(1), live.push(0)] == ["outlier", "applied", "applied"]

    replay = repeated(tmp_path, work, wrong={(0, 11): 1e6}, max_update_norm_ratio=100.0, updates_per_step=2)
    assert replay.server.refused == {0: 1}


def test_what_was_too_stale_or_had_nan_is_dropped_again(tmp_path: Path) -> None:
    def work(live: Live) -> None:
        assert [live.push(0), live.push(0), live.push(1), live.push(1)] == ["applied", "applied", "stale", "refused"]
        assert [live.push(1), live.push(0)] == ["applied", "applied"]

    replay = repeated(tmp_path, work, wrong={(1, 1): float("nan")}, staleness_limit=1)
    assert replay.server.version == 4 and replay.server.refused == {1: 1}


def test_the_end_of_an_epoch_is_told_to_the_schedule_where_it_was(tmp_path: Path) -> None:
    """It halves the learning rate between the second and the third step."""

    def work(live: Live) -> None:
        live.push(0), live.push(1)
        live.ends_epoch()
        live.push(0), live.push(1)

    assert repeated(tmp_path, work).coordinator.plan.assign(0).learning_rate == 0.5


def test_a_run_that_has_taken_its_last_step_is_finished_in_the_replay(tmp_path: Path) -> None:
    def work(live: Live) -> None:
        live.push(0), live.push(1)

    assert repeated(tmp_path, work, last_version=2).server.finished


@pytest.mark.parametrize("leaves", [False, True])
def test_rounds_behind_a_barrier_are_repeated_with_those_who_were_in_them(tmp_path: Path, leaves: bool) -> None:
    """The second worker leaves after two rounds: then a step waits for one update."""

    def work(live: Live) -> None:
        with ThreadPoolExecutor() as threads:
            for _ in range(2):
                both = [threads.submit(live.push, worker, False) for worker in (0, 1)]
                assert [each.result(30) for each in both] == ["applied", "applied"]
                live.pull(0), live.pull(1)
            if leaves:
                live.clients[1].leave(finished=False)
                assert [live.push(0), live.push(0)] == ["applied", "applied"]

    replay = repeated(tmp_path, work, barrier=2, updates_per_step=2)
    assert replay.server.version == (4 if leaves else 2)


def test_two_rounds_behind_a_barrier_that_make_one_step_are_repeated_as_two(tmp_path: Path) -> None:
    """Both meet the same version; the second begins with the worker that was first before."""

    def work(live: Live) -> None:
        with ThreadPoolExecutor() as threads:
            for _ in range(2):
                both = [threads.submit(live.push, worker) for worker in (0, 1)]
                assert [each.result(30) for each in both] == ["applied", "applied"]

    options = {"barrier": 2, "updates_per_step": 4, "grace_period": 60.0}
    assert repeated(tmp_path, work, **options).server.version == 1
