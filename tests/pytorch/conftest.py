"""Fixtures of the tests of plain PyTorch loops."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

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


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes a ``Trainer`` follow a run."""
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    return import_module("fairseq_async.pytorch.trainer.follow_run")
