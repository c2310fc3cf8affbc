"""A worker's first connection to a server that is busy: it may write the state of a large model for minutes."""

import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from fairseq_async.errors import ExchangeError
from fairseq_async.server.network import client_connection as connection
from fairseq_async.worker.client import Client
from scripts.faults.thread_server import ThreadServer


def test_a_server_that_says_nothing_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE", 0.2)
    server = ThreadServer(1, tmp_path)
    try:
        busy, tick = threading.Event(), server.service.tick

        def slow_tick() -> float:
            busy.set()
            time.sleep(0.7)
            return tick()

        monkeypatch.setattr(server.service, "tick", slow_tick)
        assert busy.wait(10)
        with caplog.at_level(logging.WARNING):
            Client(server.address, server.token, 0).close()
        assert f"the server at {server.address} says nothing yet; still waiting" in caplog.text
    finally:
        server.stop()


def test_a_server_that_never_says_anything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine takes connections, and no program of it answers."""
    monkeypatch.setattr(connection, "_SILENCE", 0.1)
    monkeypatch.setattr(connection, "_GREETING_SECONDS", 0.3)
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ExchangeError, match=f"the server at {address} says nothing"):
            Client(address, "token", 0)
