"""Connections that break when the server has answered."""

from typing import Any

import pytest

from fairseq_async.errors import ExchangeError
from fairseq_async.worker.async_worker import AsyncWorker


def lose_next_answer(worker: AsyncWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer does not reach the worker, whose connection is gone with it."""
    channel = worker.client._channel
    receive = channel.answer

    def lost(expected: type[Any]) -> Any:
        receive(expected)
        channel.close()
        raise ExchangeError("cut")

    monkeypatch.setattr(channel, "answer", lost)
