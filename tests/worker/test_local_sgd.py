"""Workers of local SGD with a real server process: in shared memory, and over TCP at another address than 127.0.0.1."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError, RefusedError, as_flag
from fairseq_async.method import methods
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import DelayedNesterovOptions, LocalSGDOptions, OuterSGDOptions, ServerOptions
from fairseq_async.options.validation import checked
from fairseq_async.protocol import Assignment, Push, PushReply, Report, Status, Welcome, WorkReply
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.local_sgd import DirectExchange, LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.references import DelayedNesterov64
from tests.helpers.stand_ins import Clock

MODULE = "fairseq_async.server.programs.local_sgd_main"
TARGETS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])  # one a worker: they pull apart
INNER_LR = 0.1
Start = Callable[..., ServerProcess]


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    started: list[ServerProcess] = []

    def begin(workers: int, name: str = "run") -> ServerProcess:
        log = tmp_path / f"{name}.log"
        started.append(ServerProcess(MODULE, workers, tmp_path / name, log, host=request.param))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


class Worker:
    """Plain SGD on |θ − target|²/2, whose gradient is θ − target."""

    def __init__(self, server: ServerProcess, worker: int, options: LocalSGDOptions, workers: int) -> None:
        self.theta = torch.zeros(3)
        self.target = TARGETS[worker]
        client = Client(LastingConnection(server.address, server.token, worker))
        self.local = local_sgd_worker(client, TensorReplica([("theta", self.theta)]), options)
        self.spec = local_sgd_spec(options, workers, [], None, {})

    def enter(self, state: str | None = None) -> None:
        welcome = self.local.join(self.spec)
        if not welcome.initialised:
            welcome = self.local.bring_parameters(state)
        self.local.begin(welcome)

    def step(self, seconds: float = 0.01) -> bool:
        self.theta -= INNER_LR * (self.theta - self.target)
        return self.local.step(seconds, float(self.theta[0]))

    def run(self, pause: float = 0.0) -> None:
        while not self.local.finished:
            time.sleep(pause)
            self.step()


def entered(server: ServerProcess, workers: int, **options: Any) -> list[Worker]:
    """Workers that are in the run and have not taken a step."""
    all_of_them = [Worker(server, w, methods.parse(LocalSGDOptions, options, "test"), workers) for w in range(workers)]
    for worker in all_of_them:
        worker.enter()
    return all_of_them


def train(server: ServerProcess, workers: int, pauses: list[float] | None = None, **options: Any) -> list[Worker]:
    """All workers to the end of the run, each in a thread of its own."""
    all_of_them = [Worker(server, w, methods.parse(LocalSGDOptions, options, "test"), workers) for w in range(workers)]

    def work(worker: Worker, pause: float) -> None:
        worker.enter()
        worker.run(pause)
        worker.local.client.leave(finished=False)

    threads = [
        threading.Thread(target=work, args=(w, pause), daemon=True)
        for w, pause in zip(all_of_them, pauses or [0.0] * workers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return all_of_them


def local_steps(theta: Tensor, target: Tensor, steps: int) -> Tensor:
    """Where a worker comes to from theta, in float64."""
    for _ in range(steps):
        theta = theta - INNER_LR * (theta - target)
    return theta


def diloco(rounds: int, steps: int, lr: float, momentum: float, workers: int = 3) -> Tensor:
    """In float64, as torch's SGD with Nesterov momentum has it."""
    theta, m = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(rounds):
        deltas = [theta - local_steps(theta, target, steps) for target in TARGETS[:workers].double()]
        mean = torch.stack(deltas).mean(0)
        m = momentum * m + mean
        theta = theta - lr * (momentum * m + mean)
    return theta


@pytest.mark.parametrize(
    "options",
    [{"outer": "diloco"}, {"outer": "delayed_nesterov", "grace_period": 20.0}],
    ids=["diloco", "delayed nesterov with a grace period"],
)
def test_equal_workers_take_dilocos_steps(start: Start, options: dict[str, Any]) -> None:
    workers = train(start(3), 3, local_steps=4, total_steps=40, **options)
    expected = diloco(10, 4, 0.7, 0.9)
    for worker in workers:
        assert torch.allclose(worker.theta.double(), expected, rtol=1e-6, atol=1e-6)
        assert worker.local.total_progress == 40


def test_asynchronous_workers_take_the_steps_that_the_events_tell(start: Start, tmp_path: Path) -> None:
    """Who comes when is up to the machine: the run is repeated in float64 in the order that the server has noted."""
    options = {"outer": "delayed_nesterov", "outer_lr": 0.4, "local_steps": 5, "total_steps": 150}
    workers = train(start(2), 2, [0.001, 0.004], **options)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    reference = DelayedNesterov64(torch.zeros(3), 0.4, 0.9, delay=2)
    versions = [reference.theta]
    for event in events:
        before = versions[event["base_version"]]
        after = local_steps(before, TARGETS[event["worker"]].double(), event["local_steps"])
        versions.append(reference.arrive(before - after))
        assert event["version_after"] == len(versions) - 1
    for worker in workers:
        assert torch.allclose(worker.theta.double(), versions[-1], rtol=1e-5, atol=1e-5)
    assert sum(event["local_steps"] for event in events) == 300
    assert {event["worker"] for event in events} == {0, 1} and any(event["staleness"] for event in events)
    assert any(event["cosine"] is not None for event in events)


def test_dynamic_local_steps_follow_the_measured_speed(start: Start) -> None:
    fast, slow = entered(start(2), 2, local_steps=8, dynamic_local_steps=True)
    for _ in range(8):
        fast.step(seconds=0.1)
    for _ in range(7):
        slow.step(seconds=0.4)
    slow.step(seconds=100.0)  # one slow step does not count
    assert slow.local.local_steps == 2
    for _ in range(8):
        fast.step(seconds=0.1)
    assert fast.local.local_steps == 8


def test_a_round_goes_on_without_a_worker_that_died(start: Start) -> None:
    first, second = entered(start(2), 2, outer="diloco", local_steps=3, outer_lr=1.0, outer_momentum=0.0)
    second.local.client.connection.channel.close()
    for _ in range(3):
        first.step()
    assert first.local.version == 1
    assert torch.allclose(first.theta, (1 - (1 - INNER_LR) ** 3) * TARGETS[0])  # its own steps alone


def test_late_updates_can_be_dropped(start: Start) -> None:
    first, second = entered(start(2), 2, outer="sgd", local_steps=1, staleness_limit=1)
    for _ in range(2):
        first.step()
    before = first.theta.clone()
    second.step()
    assert torch.equal(second.theta, before)  # it takes what there is, and has added nothing
    second.step()
    assert not torch.equal(second.theta, before)


def test_delay_compensation_sees_where_the_worker_started(start: Start) -> None:
    first, second = entered(start(2), 2, outer="sgd", outer_lr=1.0, local_steps=1, delay_compensation=0.5)
    g0, g1 = -INNER_LR * TARGETS[0], -INNER_LR * TARGETS[1]
    first.step()
    now = -g0 / 2
    assert torch.allclose(first.theta, now)
    second.step()
    assert torch.allclose(second.theta, now - (g1 + 0.5 * g1 * g1 * now) / 2)


def test_a_worker_that_diverges_is_refused_and_stops(start: Start) -> None:
    (worker,) = entered(start(1), 1, local_steps=1)
    worker.target = torch.full((3,), float("nan"))
    for _ in range(2):
        worker.step()
        assert worker.theta.tolist() == [0.0, 0.0, 0.0]  # the server's
    with pytest.raises(RefusedError, match=r"last 3 updates of worker 0 had NaN or Inf and were refused"):
        worker.step()


def test_the_server_goes_on_from_its_state_in_a_checkpoint(start: Start, tmp_path: Path) -> None:
    options = DelayedNesterovOptions(local_steps=2, delay=3)
    state = str(tmp_path / "state.pt")

    def resume_at(cut: int) -> Tensor:
        """Momentum and buffer are half-way when the server is replaced."""
        worker = Worker(start(1, f"first-{cut}"), 0, options, 1)
        worker.enter()
        for step in range(20):
            if step == cut:
                worker.local.client.save_state(state)
                worker = Worker(start(1, f"second-{cut}"), 0, options, 1)
                worker.enter(state)
            worker.step()
        return worker.theta

    assert torch.equal(resume_at(8), resume_at(99))


def test_a_checkpoint_of_another_method_is_refused(start: Start, tmp_path: Path) -> None:
    state = str(tmp_path / "state.pt")
    (worker,) = entered(start(1), 1, outer="nesterov")
    worker.local.client.save_state(state)
    other = Worker(start(1, "other"), 0, DelayedNesterovOptions(), 1)
    with pytest.raises(RefusedError, match="of local_sgd with outer nesterov, this run is of local_sgd with outer del"):
        other.enter(state)


def test_steps_go_on_while_an_answer_is_on_its_way_and_none_is_lost(start: Start) -> None:
    """Alone, with a server that takes its steps as they are, the worker ends where plain training ends."""
    options = OuterSGDOptions(outer_lr=1.0, local_steps=10, total_steps=100, overlap=True)
    worker = Worker(start(1), 0, options, 1)
    push, arrives = worker.local.client.push, threading.Event()

    def held(write: Callable[[Tensor], object], message: Push) -> PushReply:
        assert arrives.wait(30)
        return push(write, message)

    worker.local.client.push = held  # type: ignore[method-assign]
    worker.enter()
    in_flight: list[float] = []
    for _ in range(10):  # the first round is sent
        worker.step()
    while not worker.local.finished:
        if worker.local.done == worker.local.local_steps - 1:  # the next step waits for the answer
            arrives.set()
        if worker.step():
            in_flight.append(worker.local.last["steps_in_flight"])
            arrives.clear()
    assert in_flight[:8] == [10] * 8
    expected = torch.zeros(3)
    for _ in range(round(worker.local.total_progress)):
        expected -= INNER_LR * (expected - worker.target)
    assert worker.local.total_progress >= 100 and torch.allclose(worker.theta, expected, atol=1e-5)


@pytest.mark.parametrize("given", ["10.0.0.1", ":29400", "10.0.0.1:port", "10.0.0.1:70000", "a..b:29400", "node1:²"])
def test_a_server_address_that_is_none_names_its_flag(given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--server: an address is written HOST:PORT, .*'{given}'"):
        checked(ServerOptions, {"server": given}, "local_sgd", as_flag)


def alone(pulls: list[dict[str, Any]]) -> LocalSGDWorker:
    """A worker with a server that answers every pull with version 5."""
    client = SimpleNamespace(worker=1, pull=lambda copy, **asked: pulls.append(asked) or 5)
    return LocalSGDWorker(client, TensorReplica([("w", torch.zeros(3))]))  # type: ignore[arg-type]


def test_the_message_of_a_round_says_all_that_was_counted_in_it() -> None:
    local, position = alone([]), {"epoch": 1}
    work = Assignment(local_steps=4, shard=2, offset=7, progress=10.0, progress_per_step=0.5, total_progress=8.0)
    local.take_work(WorkReply(False, work))
    local.sequence, local.version, local.waited = 3, 9, 1.25
    for value in (1.0, 2.0):
        local.batches.note(torch.full((2, 2), value))
    for seconds, loss in ((1.0, 4.0), (2.0, torch.tensor(5.0)), (9.0, 9.0)):
        local.count(seconds, loss)
    local.tokens, local.epochs = 30.0, 0.125
    counted = {"local_steps": 3, "step_seconds": 2.0, "computing_seconds": 12.0, "loss": 6.0, "waiting_seconds": 1.25}
    given = {"shard": 2, "offset": 7, "progress": 10.0, "progress_per_step": 0.5, "epochs": 0.125, "tokens": 30.0}
    report = Report(position, first_batch="1d3e2c5ff32c896b", **counted, **given)  # type: ignore[arg-type]
    assert local.message(position) == Push(3, 9, 3.0, report, pulls=True)
    assert (local.progress, local.run_progress, local.total_progress) == (11.5, 11.0, 8.0)
    local.restart_counts()
    nothing = {"local_steps": 0, "step_seconds": 0.0, "computing_seconds": 0.0, "loss": None, "waiting_seconds": 1.25}
    report = Report(**nothing, **given | {"epochs": 0.0, "tokens": 0.0})  # type: ignore[arg-type]
    assert local.message(None) == Push(3, 9, 1.0, report, pulls=True)


def test_a_worker_waits_from_its_last_step_until_it_has_the_parameters_of_the_next() -> None:
    clock, local = Clock(100.0), alone([])

    def answer(write: object, push: Push) -> PushReply:
        clock.now += 3.0
        return PushReply(Status.APPLIED, 6, 1, 0, False, Assignment(local_steps=2))

    def pull(copy: object, **asked: object) -> int:
        clock.now += 0.5
        return 6

    vars(local.client).update(push=answer, pull=pull)
    local.clock = clock
    local.take_work(WorkReply(False, Assignment(local_steps=1)))
    DirectExchange(local).run(None)
    assert local.waited == local.last["waiting_seconds"] == 3.5


@pytest.mark.parametrize("shard", [None, 1])
def test_the_progress_of_the_run_waits_where_the_others_were_slower_than_estimated(shard: int | None) -> None:
    local, reached = alone([]), list[float]()
    for total in (4.0, 5.5, 9.0):
        work = Assignment(local_steps=4, shard=shard, progress=total, total_progress=total)
        local.take_work(WorkReply(False, work))
        local.restart_counts()
        for _ in range(3):
            local.count(0.1, None)
            reached.append(local.run_progress)
    local.count_as_sent()  # with the answer still on its way
    reached.append(local.run_progress)
    local.take_work(WorkReply(False, Assignment(local_steps=4, shard=shard, progress=11.0, total_progress=11.0)))
    reached.append(local.run_progress)
    assert reached == [5.0, 6.0, 7.0, 7.0, 7.5, 8.5, 10.0, 11.0, 12.0, 12.0, 12.0]


@pytest.mark.parametrize("finished", [False, True])
def test_a_worker_begins_where_its_welcome_says_and_takes_no_step_of_a_schedule_behind_its_last(finished: bool) -> None:
    pulls = list[dict[str, Any]]()
    local, work = alone(pulls), Assignment(local_steps=4, progress=8.5, total_progress=8.0)
    local.begin(Welcome(True, "", True, 2, sequence=6, refused=2, finished=finished, total_steps=10, assignment=work))
    assert (local.joined, local.sequence, local.refusals.total, local.version) == (True, 6, 2, 5)
    assert pulls == [{"starts": not finished}] and local.assignment == work
    local.count(0.1, None)
    assert (local.progress, local.finished) == (9.5 if finished else 9.0, finished)
    local.take_work(WorkReply(finished, Assignment(local_steps=4, progress=8.0)))
    local.count(0.1, None)
    assert local.step_number == 10, "its own steps after the 8 of the run, wherever the progress is"
