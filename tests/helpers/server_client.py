"""Clients of a server of six parameters with plain SGD, as workers use them."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import ExchangeError
from fairseq_async.protocol import Layout, Push, PushReply, Report, Request, encode
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from scripts.faults.thread_server import ThreadServer

SGD_SERVER = "scripts.faults.sgd_server"
LAYOUT = Layout.of([("weight", torch.zeros(2, 2)), ("bias", torch.zeros(2))])
METHOD = sgd_spec()
StartServer = Callable[..., ServerProcess]
StartThreadServer = Callable[[int], ThreadServer]
# Of a test whose servers' workers share memory with them, and are then on another machine.
BOTH_WAYS = pytest.mark.parametrize(
    "start_server", ["127.0.0.1", "127.0.0.2"], indirect=True, ids=["shared memory", "TCP"]
)


def join(
    server: ServerProcess | ThreadServer,
    worker: int | None,
    patience: float = 0.0,
    tls: Path | None = None,
    **changes: Any,
) -> Client:
    """A client of the server; the first brings the parameters, which are all 1.

    ``changes`` are those of :func:`~scripts.faults.sgd_server.sgd_spec`.
    """
    client = Client(LastingConnection(server.address, server.token, worker, patience, tls=tls))
    if not client.join(LAYOUT, sgd_spec(**changes)).initialised:
        client.slot.fill_(1.0)
        client.initialise(None)
    return client


def join_patiently(server: ServerProcess | ThreadServer, worker: int | None, **changes: Any) -> Client:
    """A client that waits for a server that has gone."""
    return join(server, worker, patience=30.0, **changes)


def push(client: Client, sequence: int, value: float, base: int = 0, **report: Any) -> PushReply:
    """Sends an update in which every parameter has this value; returns the answer."""
    reported = Report(**{"position": {"epoch": 1, "seen": sequence}} | report)
    return client.push(lambda slot: slot.fill_(value), Push(sequence, base, 1.0, reported))


def changed(request: Request, change: Mapping[str, Any]) -> bytes:
    """The request with other fields, which need not be right."""
    return json.dumps(json.loads(encode(request)) | change).encode()


def ask(client: Client, body: bytes) -> dict[str, Any]:
    """Sends a message, right or wrong; returns the answer."""
    client.connection.channel.send(body, client.slot if client.memory.remote else None)
    answer: dict[str, Any] = json.loads(client.connection.channel.receive())
    return answer


def pull(client: Client) -> tuple[int, float]:
    """The version, and the value that all parameters have."""
    values = torch.empty(LAYOUT.size)
    version = client.pull(values.copy_)
    assert values.min() == values.max()
    return version, values[0].item()


def kill(server: ServerProcess) -> None:
    """By SIGKILL."""
    os.kill(server.process.pid, signal.SIGKILL)


def lose_next_answer(worker: AsyncWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer does not reach the worker, whose connection is gone with it."""
    channel = worker.client.connection.channel
    receive = channel.answer

    def lost(expected: type[Any]) -> Any:
        receive(expected)
        channel.close()
        raise ExchangeError("cut")

    monkeypatch.setattr(channel, "answer", lost)
