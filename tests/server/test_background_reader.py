"""What workers are told while the server is at a step that does not end before the test lets it."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, PushReply, Receipt, Status
from fairseq_async.server.plan import EpochPlan
from fairseq_async.worker.connection.client import Client
from scripts.faults.sgd_server import build
from scripts.faults.thread_server import ThreadServer
from tests.helpers.hybrid_job import HybridJob
from tests.helpers.in_process import server as parameter_server
from tests.helpers.run_files import events
from tests.helpers.server_client import ask, changed, join, pull, push
from tests.helpers.waiting import wait_until


class Step:
    """``begun`` when the server is at it; it ends with ``go_on``."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, EpochPlan]:
        rule, plan = build(spec, layout, parameters)
        rule.optimizer.register_step_pre_hook(self._hold)
        return rule, plan

    def _hold(self, *_: Any) -> None:
        self.begun.set()
        assert self.go_on.wait(30)


@pytest.fixture
def step() -> Iterator[Step]:
    step = Step()
    yield step
    step.go_on.set()


@pytest.fixture
def server(step: Step, tmp_path: Path) -> Iterator[ThreadServer]:
    server = ThreadServer(3, tmp_path, build=step.build)
    yield server
    step.go_on.set()
    server.stop()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    """Asks in a thread: the answer may come later."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


Beside = Callable[..., Future[Any]]


def at_a_step(server: ThreadServer, step: Step, beside: Beside, **changes: Any) -> tuple[list[Client], Any]:
    """Three workers, of whom 0 has sent an update and 1 another, which the server is at; and what 1 will be told."""
    workers = [join(server, worker, updates_per_step=2, **changes) for worker in range(3)]
    assert push(workers[0], 0, 1.0).status is Status.ACCEPTED
    second = beside(push, workers[1], 0, 2.0)
    assert step.begun.wait(10)
    return workers, second


def has_no_answer(question: Future[Any]) -> bool:
    time.sleep(0.3)
    return not question.done()


def test_an_update_that_will_only_be_added_is_accepted_and_comes_behind_the_step(
    server: ThreadServer, step: Step, beside: Beside, tmp_path: Path
) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    accepted = push(first, 1, 4.0)
    assert accepted.status is Status.ACCEPTED and accepted.staleness == 1
    assert pull(first) == (0, 1.0)
    filling = beside(push, third, 0, 8.0)
    assert has_no_answer(filling) and not stepping.done()
    step.go_on.set()
    assert stepping.result(10).version == 1
    assert filling.result(10).version == 2
    assert pull(first) == (2, 1.0 - (1.0 + 2.0) / 2 - (4.0 + 8.0) / 2)
    settled = [(event["worker"], event["sequence"], event["staleness"]) for event in events(tmp_path)]
    assert settled == [(0, 0, 0), (1, 0, 0), (0, 1, 1), (2, 0, 1)]


def test_an_update_of_a_worker_that_dies_after_the_answer_counts(
    server: ThreadServer, step: Step, beside: Beside, tmp_path: Path
) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    assert push(third, 0, 4.0).status is Status.ACCEPTED
    third._channel.close()
    third.memory = None
    step.go_on.set()
    assert stepping.result(10).version == 1
    again = join(server, 2, updates_per_step=2)
    assert push(again, 1, 8.0).version == 2
    assert pull(first) == (2, 1.0 - (1.0 + 2.0) / 2 - (4.0 + 8.0) / 2)


def test_an_update_that_comes_twice_counts_once(server: ThreadServer, step: Step, beside: Beside) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    assert push(first, 0, 1.0).status is Status.ACCEPTED
    step.go_on.set()
    assert stepping.result(10).version == 1
    assert [push(first, 1, 4.0).status.value, push(third, 0, 8.0).status.value] == ["accepted", "applied"]
    assert pull(first) == (2, 1.0 - (1.0 + 2.0) / 2 - (4.0 + 8.0) / 2)


@pytest.mark.parametrize(
    ("update", "status"),
    [
        ({"wait": True}, "applied"),
        ({"weight": -1.0}, None),
        ({"report": {"epochs": "many"}}, None),
        ({"base_version": 9}, None),
        ({"sequence": None}, None),
    ],
)
def test_what_is_not_as_usual_is_answered_behind_the_step(
    server: ThreadServer, step: Step, beside: Beside, update: dict[str, Any], status: str | None
) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    usual = Push(1, 0, 1.0, wait=False)
    question = beside(ask, first, changed(usual, update))
    assert has_no_answer(question)
    step.go_on.set()
    assert question.result(10).get("status") == status
    assert stepping.result(10).version == 1


def test_other_questions_are_answered_behind_the_step(
    server: ThreadServer, step: Step, beside: Beside, tmp_path: Path
) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    path = tmp_path / "state.pt"
    question = beside(first.save_state, str(path))
    assert has_no_answer(question) and not path.exists()
    step.go_on.set()
    assert question.result(10) == 1
    assert torch.load(path, weights_only=True)["server"]["version"] == 1


def test_bytes_that_are_no_message_close_that_connection(server: ThreadServer, step: Step, beside: Beside) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    third._channel.connection.sendall(b"\xff" * 64)
    assert push(first, 1, 4.0).status is Status.ACCEPTED
    step.go_on.set()
    assert stepping.result(10).version == 1
    wait_until(lambda: 2 not in server.service.peers)
    assert push(second, 1, 8.0, base=1).version == 2


def test_a_message_that_is_not_json_closes_that_connection(server: ThreadServer, step: Step, beside: Beside) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    third._channel.send(b"no JSON")
    assert push(first, 1, 4.0).status is Status.ACCEPTED
    step.go_on.set()
    assert stepping.result(10).version == 1
    wait_until(lambda: 2 not in server.service.peers)
    assert push(second, 1, 8.0, base=1).version == 2


def test_the_last_step_ends_the_run_for_an_update_that_comes_in_it(
    server: ThreadServer, step: Step, beside: Beside
) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside, last_version=1)
    late = beside(push, first, 1, 4.0)
    assert has_no_answer(late)
    step.go_on.set()
    assert stepping.result(10).finished
    assert late.result(10).status is Status.FINISHED


def test_an_update_that_was_accepted_in_the_last_step_does_not_hold_its_sender(
    server: ThreadServer, step: Step, beside: Beside, tmp_path: Path
) -> None:
    """That the step ends the run, because the data were passed, is known behind it."""
    first, second = (join(server, worker, updates_per_step=2, max_epoch=1) for worker in (0, 1))
    assert push(first, 0, 1.0).status is Status.ACCEPTED
    stepping = beside(push, second, 0, 2.0, epochs=1.0)
    assert step.begun.wait(10)
    assert push(first, 1, 4.0).status is Status.ACCEPTED
    step.go_on.set()
    assert stepping.result(10).finished
    assert beside(push, first, 2, 8.0).result(5).status is Status.FINISHED
    assert [(event["worker"], event["sequence"]) for event in events(tmp_path)] == [(0, 0), (1, 0)]


def test_an_update_that_is_refused_takes_no_step_for_others_to_come_in(
    server: ThreadServer, step: Step, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have taken one, had it not had NaN, which it takes the server a moment to see."""
    workers = [join(server, worker, updates_per_step=2) for worker in range(3)]
    assert push(workers[0], 0, 1.0).status is Status.ACCEPTED
    wait_until(parameter_server(server.service).moves_parameters)  # it is answered before it is looked at
    admit, looking, seen = parameter_server(server.service).admit, threading.Event(), threading.Event()

    def slowly(update: Update, norm: float | None = None) -> Receipt:
        looking.set()
        assert seen.wait(30)
        return admit(update, norm)

    monkeypatch.setattr(parameter_server(server.service), "admit", slowly)
    refused = beside(push, workers[1], 0, float("nan"))
    assert looking.wait(10)
    stepping = beside(push, workers[2], 0, 2.0)
    assert has_no_answer(stepping)
    step.go_on.set()
    seen.set()
    assert refused.result(10).status is Status.REFUSED
    assert stepping.result(10).version == 1


def test_plain_asynchronous_sgd_has_nothing_to_accept(server: ThreadServer, step: Step, beside: Beside) -> None:
    workers = [join(server, worker, updates_per_step=1) for worker in range(3)]
    questions = [beside(push, worker, 0, 1.0) for worker in workers]
    assert step.begun.wait(10) and has_no_answer(questions[0]) and not any(each.done() for each in questions)
    step.go_on.set()
    assert sorted(each.result(10).version for each in questions) == [1, 2, 3]


def test_every_update_of_busy_workers_counts_once(
    server: ThreadServer, step: Step, beside: Beside, tmp_path: Path
) -> None:
    """Some are there when a step begins, some come in it, some behind it."""
    step.go_on.set()
    workers = [join(server, worker, updates_per_step=3) for worker in range(3)]

    def work(client: Client) -> PushReply:
        for sequence in range(300):
            answer = push(client, sequence, float(client.worker + 1))
        return answer

    for each in [beside(work, client) for client in workers]:
        assert each.result(60).status in (Status.ACCEPTED, Status.APPLIED)
    workers[0].save_state(str(tmp_path / "state.pt"))  # behind whatever was accepted
    settled = [(event["worker"], event["sequence"]) for event in events(tmp_path)]
    assert sorted(settled) == [(worker, sequence) for worker in range(3) for sequence in range(300)]
    assert pull(workers[0]) == (300, pytest.approx(1.0 - 300 * (1 + 2 + 3) / 3, rel=1e-5))


def test_a_worker_that_waits_for_its_slot_says_so(server: ThreadServer, step: Step, beside: Beside) -> None:
    (first, second, third), stepping = at_a_step(server, step, beside)
    job = HybridJob(third)
    job.backward(torch.ones(2, 2))
    job.worker.scale_into_slot(1.0)
    job.worker.step(1, None)  # accepted, and not taken before the step ends

    def seconds_to_scale() -> float:
        began = time.perf_counter()
        job.worker.scale_into_slot(1.0)
        return time.perf_counter() - began

    job.backward(torch.ones(2, 2))
    scaling = beside(seconds_to_scale)
    assert has_no_answer(scaling)
    step.go_on.set()
    seconds, waited = scaling.result(10), job.worker.waited
    assert seconds / 2 < waited <= seconds
    job.worker.step(1, None)
    assert job.worker.last["push_seconds"] >= waited and job.worker.waited == 0.0
    assert stepping.result(10).version == 1


def test_no_thread_stays_behind(step: Step, tmp_path: Path) -> None:
    before = threading.active_count()
    server = ThreadServer(3, tmp_path, build=step.build)
    server.stop()
    wait_until(lambda: threading.active_count() <= before)
