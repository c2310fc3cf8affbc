"""Fixtures of the tests of plain PyTorch loops."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairseq_async.server.plan import Build
from tests.helpers.thread_workers import ThreadWorkers

StartWorkers = Callable[[int, Build], ThreadWorkers]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StartWorkers]:
    """``workers(count, build)``: so many, whose server is built so."""
    started: list[ThreadWorkers] = []

    def start(count: int, build: Build) -> ThreadWorkers:
        started.append(ThreadWorkers(monkeypatch, tmp_path / f"run-{len(started)}", count, build))
        return started[-1]

    yield start
    for each in started:
        each.server.stop()
