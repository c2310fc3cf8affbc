"""What a worker can do while its update waits for a round, and what an error in a round costs."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fairseq_async.algorithms import StalenessPolicy
from fairseq_async.errors import HalfAppliedError, RefusedError
from fairseq_async.protocol import (
    Hello,
    Initialise,
    Leave,
    Pull,
    Push,
    Report,
    SaveState,
    ScheduleEvent,
    WaitForWork,
    Welcome,
    encode,
)
from fairseq_async.server.service import Service
from fairseq_async.worker.connection.client import Client
from scripts.faults.thread_server import ThreadServer
from tests.helpers import halving
from tests.helpers.halving import LAYOUT, halving_spec
from tests.helpers.in_process import Connection, new_service, slot
from tests.helpers.in_process import server as parameter_server
from tests.helpers.server_client import join, push
from tests.helpers.waiting import wait_until

CLOSES_EARLY = {"closes_early": True, "grace_period": 30.0, "waits_for_dead": False}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    """Of workers on another machine, whose tensors come over the connection."""
    with ThreadServer(2, tmp_path, "127.0.0.2") as server:
        yield server


def held(server: ThreadServer) -> set[int]:
    run = server.service.begun
    return set() if run is None else run.coordinator.server.held


def frame(request: Push, value: float, most: int = 24) -> bytes:
    """An update of six values, or the beginning of it."""
    body, tensor = encode(request), torch.full((6,), value).numpy().tobytes()
    return struct.pack("!IQ", len(body), 24) + body + tensor[:most]


def send_update(client: Client, value: float, most: int = 24) -> None:
    """Sends the first one, or one more, as no client of ours would."""
    client.connection.channel.connection.sendall(frame(Push(0, 0, 1.0, Report()), value, most))


def enter(service: Service, worker: int) -> Connection:
    """A worker behind a barrier of two, in shared memory; all parameters are 0."""
    connection = Connection(service)
    connection.introduce(worker)
    if not connection.ask(Hello(halving_spec(barrier=2), LAYOUT, remote=False), Welcome).initialised:
        slot(service, 0).zero_()
        connection.ask(Initialise(False), Welcome)
    return connection


@pytest.mark.parametrize("changes", [{}, CLOSES_EARLY], ids=["barrier", "steps that close"])
@pytest.mark.parametrize("most", [20, 24], ids=["half a frame", "a frame"])
def test_what_was_checked_is_what_is_applied(server: ThreadServer, changes: dict[str, object], most: int) -> None:
    """Values that come while an update is held neither pass its check nor replace it: their sender is disconnected."""
    one, two = (join(server, worker, updates_per_step=2, barrier=2, **changes) for worker in (0, 1))
    send_update(two, 0.5)
    wait_until(lambda: held(server) == {1}, 10)
    send_update(two, float("nan"), most)
    wait_until(lambda: two.connection.channel.is_closed(1.0), 10)
    assert server.service.refusals.counts["no message"] == 1
    wait_until(lambda: held(server) == set(), 10)  # its update went with it
    again = join(server, 1, updates_per_step=2, barrier=2, **changes)
    send_update(again, 0.5)
    wait_until(lambda: held(server) == {1}, 10)
    push(one, 0, 1.5)
    run = server.service.described
    assert torch.equal(run.coordinator.server.parameters, torch.zeros(6))  # 1 − (0.5 + 1.5) / 2
    again.connection.channel.receive()  # its answer
    again.connection.channel.connection.sendall(
        frame(Push(1, 1, 1.0, Report()), 1.0)
    )  # and now it may send the next one
    wait_until(lambda: held(server) == {1}, 10)


def test_a_worker_that_waits_for_its_answer_asks_for_nothing(tmp_path: Path) -> None:
    """In shared memory the parameters would come into the slot, over its update."""
    service = new_service(2, tmp_path, halving.build, lambda: 1000.0)
    first, second = (enter(service, worker) for worker in (0, 1))
    slot(service, 0).fill_(1.0)
    assert not first.send(Push(0, 0, 1.0, Report()))
    hello = Hello(halving_spec(barrier=2), LAYOUT, remote=False)
    for request in (Pull(), Push(1, 0, 1.0, Report()), WaitForWork(), hello, Initialise(False)):
        first.send(request)
        assert first.last["kind"] == "error" and "waits for the answer to its update" in first.last["error"]
    allowed = {"schedule_reply": ScheduleEvent("a", "begin_epoch", 1), "state_saved": SaveState()}
    assert all(first.send(request) and first.last["kind"] == kind for kind, request in allowed.items())
    slot(service, 1).fill_(3.0)
    second.send(Push(0, 0, 1.0, Report()))
    assert parameter_server(service).version == 1 and parameter_server(service).parameters.tolist() == [-2.0] * 3
    assert not first.send(Push(1, 1, 1.0, Report()))
    assert first.send(Leave(False)) and first.last["kind"] == "goodbye"


def test_an_error_in_the_middle_of_a_round_takes_the_run_back_to_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update before it is in the parameters, and its worker would wait for its answer for ever."""
    adjusted = StalenessPolicy.adjusted

    def fails_for_worker_1(self, update, *others):  # type: ignore[no-untyped-def]
        if update.worker == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return adjusted(self, update, *others)

    service = new_service(2, tmp_path, halving.build, lambda: 1000.0)
    first, second = (enter(service, worker) for worker in (0, 1))
    monkeypatch.setattr(StalenessPolicy, "adjusted", fails_for_worker_1)
    first.send(Push(0, 0, 1.0, Report()))
    with pytest.raises(HalfAppliedError, match="the update of worker 1 was not applied to its end"):
        second.send(Push(0, 0, 1.0, Report()))


def test_a_worker_that_died_unnoticed_is_not_here_already(tmp_path: Path) -> None:
    """It was started again while the server was busy, which has not read its connection to the end."""
    service = new_service(2, tmp_path, halving.build, lambda: 1000.0)
    _, killed = (enter(service, worker) for worker in (0, 1))
    with pytest.raises(RefusedError, match="worker 1 is here already"):
        Connection(service).introduce(1, instance="another")
    killed.channel.closed = True
    assert Connection(service).introduce(1, instance="another").worker == 1
    assert not service.has(killed.peer)


def test_a_worker_whose_next_work_is_not_found_may_send_its_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another machine: while an update was held, its slot took no other."""
    service = new_service(2, tmp_path, halving.build, lambda: 1000.0)
    both = [enter(service, worker) for worker in (0, 1)]
    for each in both:
        each.peer.remote = True
        service.described.slots.open(each.peer)
        each.channel.receive(torch.ones(3).numpy().tobytes())
    monkeypatch.setattr(service.described.coordinator.plan, "assign", lambda worker: 1 / 0)
    both[0].send(Push(0, 0, 1.0, Report()))
    assert both[0].channel.room is None and not both[0].channel.said[-1].startswith(b'{"kind": "error"')
    both[1].send(Push(0, 0, 1.0, Report()))
    for each in both:
        assert "division by zero" in each.last["error"] and each.peer.push is None
        assert each.channel.room is not None
