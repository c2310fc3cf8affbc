"""What a worker says and takes with each step, without a server: whole messages, and what is left behind each."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.protocol import Assignment, Push, PushReply, Report, Status, Welcome
from fairseq_async.worker import batches
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.batches import BatchDigest
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.shards import BatchCounter
from fairseq_async.worker.start.context import WorkerContext
from scripts.faults.sgd_server import sgd_spec


class Answering:
    """A connection that gives the answers of a list, and parameters that equal their version."""

    worker, workers, compressor = 1, 2, None

    def __init__(self, *answers: PushReply) -> None:
        self.answers, self.version = list(answers), 5
        self.pushed, self.slots, self.pulls = list[Push](), list[list[float]](), list[tuple[float, bool]]()
        self.calls = list[object]()

    def join(self, layout: object, spec: object, details: object) -> Welcome:
        return Welcome(True, "", True, 2)

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        write(slot := torch.full((4,), 9.0))
        self.pushed.append(push)
        self.slots.append(slot.tolist())
        answer = self.answers.pop(0)
        self.version = answer.version
        return answer

    def pull(self, copy: Callable[[Tensor], object], look_ahead: float = 0.0, starts: bool = False) -> int:
        self.pulls.append((look_ahead, starts))
        self.calls.append("pull")
        copy(torch.full((4,), float(self.version)))
        return self.version

    def wait_for_work(self, for_end: bool) -> None:
        self.calls.append(("wait", for_end))


def test_each_message_of_a_hybrid_worker_is_of_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 13.0, 18.0, 20.0, 21.0, 28.0, 30.0, 36.0, 38.0])  # begun, answered and taken
    replies = [
        PushReply(Status.OUTLIER, 5, 3, 2, False, Assignment(0.25, total_progress=3.5, micro_batches=6), 0.0),
        PushReply(Status.APPLIED, 8, 1, 2, False, Assignment(0.125, total_progress=4.5, look_ahead=1.5), 0.0),
        PushReply(Status.APPLIED, 8, 2, 2, True, Assignment(0.0625, total_progress=5.5), 0.0),
    ]
    client = Answering(*replies)
    named = [(name, Parameter(torch.zeros(size))) for name, size in (("a", 2), ("b", 1), ("c", 1))]
    (_, a), (_, b), (_, c) = named
    worker = HybridWorker(client, named)  # type: ignore[arg-type]
    worker.join(sgd_spec(workers=2, micro_batches=4, closes_early=True))
    work = Assignment(0.5, total_progress=2.5, micro_batches=5)
    worker.begin(Welcome(True, "", True, 2, sequence=3, refused=1, position={"micro_batches": 11}, assignment=work))
    assert (worker.learning_rate, worker.progress, worker.drawn, worker.sequence) == (0.5, 2.5, 11, 3)
    assert (worker.shard, worker.offset, worker.refusals.total, client.pulls) == (1, 3, 1, [(0.0, True)])
    for digest in (worker.batches, batches := BatchDigest()):
        digest.note(torch.arange(4.0)), digest.note(torch.arange(3.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    a.grad, c.grad = torch.tensor([1.0, 2.0]), torch.tensor([4.0])
    worker.step(7, 0.25, norm=1.5, factor=0.5)
    assert (worker.version, worker.drawn, worker.sequence) == (5, 16, 4)
    assert worker.last == {"staleness": 3.0, "push_seconds": 3.0, "pull_seconds": 5.0}
    assert (worker.learning_rate, worker.progress, worker.micro_batches) == (0.25, 3.5, 6)
    assert (worker.refusals.total, worker.refusals.in_a_row, len(client.pulls)) == (2, 1, 1)
    assert worker.refusals._reasons == {"a norm above --max-update-norm-ratio"}
    worker.weight, b.grad, c.grad = 9.0, torch.tensor([3.0]), None
    worker.step(7, 0.5)
    assert (worker.version, worker.look_ahead, worker.drawn, worker.refusals.in_a_row) == (8, 1.5, 22, 0)
    assert a.tolist() == [8.0, 8.0] and client.pulls[1:] == [(1.5, True)] and not worker.finished
    c.grad = torch.tensor([1.0])
    worker.step(7, None)
    assert (worker.finished, worker.look_ahead, worker.sequence, worker.micro_batches) == (True, 0.0, 6, 0)
    assert client.pulls[2:] == [(0.0, False)]
    assert worker.last == {"staleness": 2.0, "push_seconds": 6.0, "pull_seconds": 2.0}
    first = Report({"micro_batches": 16}, loss=0.25, push_seconds=0.0, pull_seconds=0.0, micro_batches=5, missing="2")
    second = Report({"micro_batches": 22}, loss=0.5, push_seconds=3.0, pull_seconds=5.0, micro_batches=6, missing="4")
    third = Report({"micro_batches": 22}, push_seconds=1.0, pull_seconds=7.0, look_ahead=1.5)
    assert client.pushed == [
        Push(3, 5, 7.0, replace(first, first_batch=batches.take()), 1.5, pulls=True),
        Push(4, 5, 9.0, second, pulls=True),
        Push(5, 8, 9.0, third, pulls=True),
    ]
    assert client.slots == [[0.5, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 1.0]]


@pytest.mark.parametrize("send", [lambda worker: worker.step(1, None), lambda worker: worker.send_done()])
def test_a_hybrid_worker_sends_nothing_computed_from_parameters_that_something_else_has_changed(
    send: Callable[[HybridWorker], None],
) -> None:
    client, weight = Answering(), Parameter(torch.zeros(4))
    worker = HybridWorker(client, [("w", weight)])  # type: ignore[arg-type]
    worker.begin(Welcome(True, "", True, 2))
    worker.send_done()
    weight.data[2] = 0.5
    with pytest.raises(ConfigurationError, match="^w is not as this worker took it from the server"):
        send(worker)
    assert not client.pushed


def test_a_hybrid_worker_whose_steps_are_whole_counts_versions_and_draws_nothing_itself() -> None:
    client, weight = Answering(), Parameter(torch.zeros(4))
    worker = HybridWorker(client, [("w", weight)])  # type: ignore[arg-type]
    worker.join(sgd_spec(workers=2))
    worker.begin(Welcome(True, "", True, 2, sequence=3, assignment=Assignment(total_progress=2.5)))
    assert (worker.progress, worker.total_progress, worker.run_progress, worker.drawn) == (5.0, 5.0, 5.0, None)
    worker.take_state({"parameters": torch.arange(4.0), "version": 12, "rule": {"steps": 7.5}})
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0] and worker.progress == 12.0 and worker.changed_parameter() is None
    worker._partial_steps = True
    assert worker.progress == 7.5
    again = HybridWorker(client, [("w", weight)])  # type: ignore[arg-type]
    again.join(sgd_spec(workers=2, micro_batches=4))
    again.begin(Welcome(True, "", True, 2, sequence=3))
    assert again.drawn == 12, "without a position, as many as all its gradients had on average"
    again.join(sgd_spec(workers=2, micro_batches=4, framework={"parts": True}))
    again.begin(Welcome(True, "", True, 2, assignment=Assignment(total_progress=2.5)))
    assert (again.progress, again.drawn) == (2.5, 8), "one that has joined draws on from the whole steps of the run"


class Sending(AsyncWorker):
    """Notes what it does at its end; ``ends`` says whether the run is over when its last work has arrived."""

    def __init__(self, client: Answering, ends: bool) -> None:
        super().__init__(client, TensorReplica([("w", torch.zeros(4))]), 3)  # type: ignore[arg-type]
        self.calls, self.ends = client.calls, ends

    def settle(self) -> None:
        self.calls.append("settle")

    def send_done(self) -> None:
        self.calls.append("send")
        self.finished = self.ends


@pytest.mark.parametrize(
    ("finished", "ends", "calls"),
    [
        (False, False, ["settle", "send", ("wait", True), "pull"]),
        (False, True, ["settle", "send", "pull"]),
        (True, True, ["settle"]),
    ],
)
def test_at_its_end_a_worker_sends_waits_and_takes_what_is_not_there_yet(
    finished: bool, ends: bool, calls: list[object]
) -> None:
    for at_the_end in (True, False):
        worker = Sending(Answering(), ends)
        worker.finished = finished
        (worker.await_end if at_the_end else worker.catch_up)()
        assert worker.calls == (calls if at_the_end else [each for each in calls if each != ("wait", True)])
        assert worker.finished is (at_the_end or ends)


def test_a_model_has_the_servers_parameters_for_a_while_and_then_its_own_and_what_was_changed(tmp_path: Path) -> None:
    calls, weight = list[str](), torch.tensor([1.0, 2.0, 3.0])
    worker: Any = SimpleNamespace(
        replica=TensorReplica([("w", weight)]),
        settle=lambda: calls.append("settle"),
        check_unchanged=lambda: calls.append("check"),
    )
    loop = WorkerLoop(worker, WorkerContext())

    def fetch(*values: float) -> Callable[[], State]:
        return lambda: calls.append("fetch") or {"server": {"parameters": torch.tensor(values)}}

    assert loop.changed() is None and loop.state is None
    loop.give_back()
    for values in ((7.0, 8.0, 9.0), (4.0, 5.0, 6.0)):  # the second time it has no parameters of its own to keep
        state = loop.take_server_parameters(fetch(*values))
        assert loop.state is state and weight.tolist() == list(values) and loop.changed() is None
    assert calls == ["settle", "fetch", "check", "settle", "fetch"] and loop.began == 0.0
    loop.give_back()
    assert weight.tolist() == [1.0, 2.0, 3.0] and loop.state is None and loop.began > 0.0
    weight.mul_(10.0)
    loop.give_back()
    assert weight.tolist() == [10.0, 20.0, 30.0], "it has its own already"
    loop.take_server_parameters(fetch(7.0, 8.0, 9.0))
    weight[1] = 0.5
    assert loop.changed() == "w"
    loop.give_back(changed="w")
    assert weight.tolist() == [10.0, 0.5, 30.0] and loop.changed() is None


@pytest.mark.parametrize("is_writer", [True, False])
def test_worker_0_brings_its_parameters_and_every_worker_begins_where_its_welcome_says(is_writer: bool) -> None:
    """Of the ranks of an island, which share a slot, one writes."""
    client: Any = Answering()
    client.slot, client.initialise = torch.full((4,), 9.0), lambda *given: given
    weight = torch.arange(4.0)
    worker = AsyncWorker(client, TensorReplica([("w", weight)], is_writer), 3)
    assert not (worker.joined or worker.finished) and worker.changed_parameter() is None
    assert worker.bring_parameters("a file", from_checkpoint=True) == ("a file", True)
    assert worker.bring_parameters(None) == (None, False)
    assert client.slot.tolist() == ([0.0, 1.0, 2.0, 3.0] if is_writer else [9.0] * 4)
    worker.begin(Welcome(True, "", True, 2, sequence=6, refused=2, finished=True))
    assert (worker.joined, worker.finished, worker.sequence, worker.refusals.total) == (True, True, 6, 2)
    assert (worker.version, weight.tolist(), client.pulls) == (5, [5.0] * 4, [(0.0, False)])
    worker.start_again()
    assert len(client.pulls) == 2 and worker.changed_parameter() is None
    weight[3] = 7.0
    assert worker.changed_parameter() == "w"
    worker.replica = TensorReplica([("v", torch.zeros(4))])
    assert worker.changed_parameter() is None, "nothing is known of the new tensors"
    worker.note_parameters()
    worker.replica.write(torch.ones(4))
    assert worker.changed_parameter() == "v"


def test_a_compressor_goes_with_a_checkpoint_and_back_where_there_is_one() -> None:
    client: Any = Answering()
    worker, restored = AsyncWorker(client, TensorReplica([("w", torch.zeros(4))]), 3), list[object]()
    assert worker.compressor_state() is None
    worker.restore_compressor({"sequence": 4})
    client.compressor = SimpleNamespace(
        state_dict=lambda: {"sequence": 4}, load_state_dict=lambda *given: restored.append(given)
    )
    worker.sequence = 4
    worker.restore_compressor(None)
    worker.restore_compressor(worker.compressor_state())
    assert restored == [({"sequence": 4}, 4)]


@pytest.mark.parametrize(("device", "gpu"), [("cpu", ""), ("cuda", "a gpu")])
def test_a_worker_says_where_its_gpu_is_to_a_server_that_may_be_there(device: str, gpu: str) -> None:
    client: Any = Answering()
    replica: Any = TensorReplica([("w", torch.zeros(4))])
    replica.device = SimpleNamespace(gpu="a gpu", asynchronous=False)
    worker = AsyncWorker(client, replica, 3)
    worker.join(sgd_spec(server_device=device))
    assert worker.details.gpu == gpu


def test_a_worker_that_waits_long_for_the_end_of_the_others_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fairseq_async.worker.async_worker._QUIET_SECONDS", 0.0)
    client, said = Answering(), threading.Event()
    monkeypatch.setattr("fairseq_async.worker.async_worker.say", lambda line: (print(line), said.set()))
    client.wait_for_work = lambda for_end: said.wait(10)  # type: ignore[method-assign]
    Sending(client, ends=False).await_end()
    line = "worker 1 has taken its last step, and waits for the end of the others, to have the finished model\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_does_not_wait_long_for_the_end_of_the_others_says_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    timer = MagicMock()
    monkeypatch.setattr("fairseq_async.worker.async_worker.threading.Timer", timer)
    client = Answering()
    client.wait_for_work = MagicMock(side_effect=ExchangeError("gone") if fails else None)  # type: ignore[method-assign]
    with pytest.raises(ExchangeError) if fails else nullcontext():
        Sending(client, ends=False).await_end()
    assert timer.call_args.args[0] == 10.0
    assert [each[0] for each in timer.return_value.method_calls] == ["start", "cancel"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("initialised", [True, False])
def test_a_new_server_is_given_the_state_of_rank_0_and_one_that_has_its_own_is_given_nothing(
    tmp_path: Path, rank: int, initialised: bool
) -> None:
    own, brought = Welcome(initialised, "", True, 2, sequence=1), Welcome(True, "", True, 2, sequence=2)
    begun, given = list[Welcome](), list[tuple[bool, bool]]()

    def bring(path: str | None, from_checkpoint: bool) -> Welcome:
        given.append((path is not None and torch.load(path, weights_only=True) == {"version": 7}, from_checkpoint))
        return brought

    worker: Any = SimpleNamespace(join=lambda spec: own, begin=begun.append, bring_parameters=bring)
    loop = WorkerLoop(worker, WorkerContext(rank=rank))
    welcome = loop.join(sgd_spec(), lambda: {"version": 7}, tmp_path / "run")
    assert begun == [welcome] == [own if initialised else brought]
    assert given == ([] if initialised else [(rank == 0, False)])
    loop.bring({"version": 7}, tmp_path / "run", from_checkpoint=True)
    assert given[-1] == (rank == 0, True) and not list(tmp_path.glob("run/*"))


def test_the_first_batch_of_a_step_depends_on_the_step_alone() -> None:
    """The second step is another one, though as much of its shard is done: an update, and a shard, are between them."""
    counter = BatchCounter(2, 1)
    drawn = []
    for sequence, offset, done in ((0, 0, 0), (1, 4, 0), (1, 4, 1), (2, 9, 1)):
        at: Any = SimpleNamespace(sequence=sequence, shard=3, offset=offset, done=done, first_micro_batch=None)
        drawn.append([counter.next(at) for _ in range(2)])
    assert drawn == [[(3, batch) for batch in step] for step in ([0, 1], [8, 9], [10, 11], [20, 21])]


def test_of_a_large_batch_the_beginning_makes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hash all of it would cost as much as a step of a small model."""
    monkeypatch.setattr(batches, "_BYTES", 64)
    found = []
    for end in (1.0, 2.0):
        digest = BatchDigest()
        for number in (1.0, 2.0):
            digest.note(torch.tensor([number, *range(15), end]))
        found.append(digest.take())
    assert found[0] is not None and found[0] == found[1]
