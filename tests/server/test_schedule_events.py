"""An event of the learning-rate schedule counts once, however often a lost answer makes the worker send it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_async.protocol import ScheduleEvent, ScheduleReply
from fairseq_async.worker.connection.client import Client
from scripts.faults.thread_server import ThreadServer
from tests.helpers.halving import LAYOUT, build, halving_spec

FIRST = ScheduleEvent("x-1", "end_epoch", 1, 1.0)
SECOND = ScheduleEvent("x-2", "end_epoch", 2, 1.0)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    server = ThreadServer(1, tmp_path, build=build)
    try:
        client = Client(server.address, server.token, 0, patience=30.0)
        client.join(LAYOUT, halving_spec())
        client.slot.zero_()
        assert client.initialise(None).assignment.learning_rate == 1.0
        yield client
    finally:
        server.stop()


def learning_rate(client: Client, event: ScheduleEvent) -> float:
    """The answer to an event with this number."""
    return client._ask(event, ScheduleReply).learning_rate


def test_an_event_that_comes_again_is_answered_as_before_and_not_counted(client: Client) -> None:
    """Each end of an epoch halves the learning rate."""
    assert [learning_rate(client, event) for event in (FIRST, FIRST, FIRST)] == [0.5, 0.5, 0.5]
    assert [learning_rate(client, event) for event in (SECOND, SECOND)] == [0.25, 0.25]


def test_an_event_that_comes_again_on_another_connection_is_not_counted(client: Client) -> None:
    assert learning_rate(client, FIRST) == 0.5
    client._channel.end()
    assert learning_rate(client, FIRST) == 0.5


def test_events_of_a_worker_that_was_started_again_are_others(client: Client) -> None:
    assert client.schedule_event("end_epoch", 1, 1.0).learning_rate == 0.5
    client.close()
    again = Client(client.address, client._endpoint.token, 0, patience=30.0)
    again.join(LAYOUT, halving_spec())
    assert again.schedule_event("end_epoch", 2, 1.0).learning_rate == 0.25


def test_events_that_the_worker_means_twice_count_twice(client: Client) -> None:
    rates = [client.schedule_event("end_epoch", epoch, 1.0).learning_rate for epoch in (1, 2)]
    assert rates == [0.5, 0.25]
