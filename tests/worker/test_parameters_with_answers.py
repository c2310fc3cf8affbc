"""Parameters behind the answer to an update, for which a worker on another machine does not have to ask."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import AsyncLocalSGDOptions, NesterovOptions, ServerOptions
from fairseq_async.protocol import Assignment, Layout, Pull, PullReply, Push, PushReply, Status
from fairseq_async.records.events import Event, read_events
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.service import Service
from fairseq_async.server.slots import Slots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.sgd_server import build
from scripts.faults.thread_server import ThreadServer
from tests.helpers.fragments import Descent, streaming
from tests.helpers.server_client import join
from tests.helpers.thread_workers import HybridJob

ROUNDS = 6


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The workers that have asked for parameters, request by request."""
    asked: list[int] = []
    answer = Service._pull

    def noted(service: Service, peer: Any, pull: Any) -> None:
        asked.append(peer.id)
        answer(service, peer, pull)

    monkeypatch.setattr(Service, "_pull", noted)
    yield asked


def options(**changes: Any) -> AsyncLocalSGDOptions:
    return NesterovOptions(**{"local_steps": 2, "total_steps": 2 * ROUNDS} | changes)


def train(run_dir: Path, host: str, given: AsyncLocalSGDOptions) -> tuple[Tensor, list[Event]]:
    """One worker to the end of its run; its parameters then, and the events."""
    with ThreadServer(1, run_dir, host, local_sgd_main.build) as server:
        descent = Descent(Client(LastingConnection(server.address, server.token, 0)), given, 1)
        descent.run()
        return descent.theta, list(read_events(run_dir / "events.jsonl"))


@pytest.mark.parametrize(
    "given",
    [
        options(),
        options(compress="e3m0,pull=int8"),
        options(compress="pull=e3m0"),
        streaming(delay=1, total_steps=2 * ROUNDS),
        streaming(delay=0, total_steps=2 * ROUNDS, compress="pull=bf16"),
    ],
    ids=lambda given: f"{given.outer}-{given.fragments}-{given.compress}"[:60],
)
def test_only_the_first_and_the_last_parameters_are_asked_for_and_all_are_the_same(
    tmp_path: Path, pulls: list[int], monkeypatch: pytest.MonkeyPatch, given: AsyncLocalSGDOptions
) -> None:
    theta, events = train(tmp_path / "behind", "127.0.0.2", given)
    assert len(pulls) == 2, "when the worker joins, and at the end of the run in fp32"
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "next_pull", lambda slots, push, reply: None)
        asked, others = train(tmp_path / "asked", "127.0.0.2", given)
    assert len(pulls) == 2 + len(events) + 1 and torch.equal(theta, asked)
    assert [(e.base_version, e.bytes_received, e.start_payload, e.norm) for e in events] == [
        (e.base_version, e.bytes_received, e.start_payload, e.norm) for e in others
    ]


def test_a_worker_that_goes_on_during_the_exchange_does_not_ask_either(tmp_path: Path, pulls: list[int]) -> None:
    train(tmp_path, "127.0.0.2", options(overlap=True))
    assert len(pulls) == 2


def test_in_shared_memory_the_slot_keeps_the_update_until_its_answer_is_heard(tmp_path: Path, pulls: list[int]) -> None:
    _, events = train(tmp_path, "127.0.0.1", options())
    assert len(pulls) == 1 + len(events)


@pytest.mark.parametrize("fragments", [1, 2])
def test_parameters_follow_an_answer_after_which_the_worker_asks_for_them_at_once(fragments: int) -> None:
    spec = local_sgd_spec(streaming(1, fragments=fragments), 1, [], ServerOptions(), {})
    slots = Slots(spec, Layout.of([("a", torch.zeros(2)), ("b", torch.zeros(3))]), 1)
    push = Push(5, 7, 1.0, pulls=True)
    reply = PushReply(Status.APPLIED, 8, 0, 0, finished=False, assignment=Assignment(look_ahead=2.0))
    expected = Pull(2.0, starts=True, fragment_of=None if fragments == 1 else 5)
    assert slots.next_pull(push, reply) == expected
    for other in (
        replace(reply, finished=True),
        replace(reply, assignment=Assignment(idle=True)),
        replace(reply, status=Status.REFUSED),
        replace(reply, version=7),
    ):
        assert slots.next_pull(push, other) is None
    assert slots.next_pull(replace(push, pulls=False), reply) is None


def test_parameters_that_are_lost_behind_their_answer_are_asked_for(
    tmp_path: Path, pulls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, events = train(tmp_path / "whole", "127.0.0.2", options())
    pulls.clear()
    with ThreadServer(1, tmp_path / "cut", "127.0.0.2", local_sgd_main.build) as server:
        descent = Descent(Client(LastingConnection(server.address, server.token, 0, patience=10.0)), options(), 1)
        for _ in range(3):
            descent.step()
        channel = descent.local.client.connection.channel
        receive = channel.answer

        def half(expected: type[Any]) -> Any:
            if expected is PushReply:
                return receive(expected)
            assert expected is PullReply
            channel.close()
            descent.local.client.slot.fill_(float("nan"))  # what has come of them
            raise ExchangeError("cut")

        monkeypatch.setattr(channel, "answer", half)
        descent.run()
    assert len(pulls) == 3 and torch.equal(descent.theta, wanted)
    cut = list(read_events(tmp_path / "cut" / "events.jsonl"))
    assert [event.sequence for event in cut] == [event.sequence for event in events]


@pytest.mark.parametrize(("look_ahead", "starts"), [(0.0, [1.0, 2.0, 2.0, 3.0, 3.0]), (1.0, [1.0, 3.0, 3.0, 4.0, 4.0])])
def test_hybrid_workers_have_parameters_behind_the_answer_to_a_step(
    tmp_path: Path, pulls: list[int], look_ahead: float, starts: list[float]
) -> None:
    """A gradient that completes no step is answered without any: what its worker has is the newest."""
    with ThreadServer(1, tmp_path, "127.0.0.2", build) as server:
        job = HybridJob(join(server, 0, updates_per_step=2, last_version=3, look_ahead=look_ahead))
        given = []
        while not job.worker.finished:
            job.backward(-torch.ones(2, 2), torch.zeros(2))
            job.worker.scale_into_slot(1.0)
            job.worker.step(1, None)
            given.append(job.parameters()[0])
    assert given == [*starts, 4.0] and len(pulls) == 2
