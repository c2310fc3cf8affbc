"""When a worker gives up because its updates are refused."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_async.errors import RefusedError
from fairseq_async.worker.async_worker import Refusals
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.thread_workers import LAYOUT, local_sgd


def test_a_worker_gives_up_after_so_many_refused_updates_in_a_row() -> None:
    refusals = Refusals(worker=1, limit=2)
    refusals.count(1)
    refusals.count(1)  # the update in between was taken
    refusals.count(2)
    with pytest.raises(RefusedError, match="the last 2 updates of worker 1 had NaN or Inf and were refused"):
        refusals.count(3)


def test_a_server_that_goes_back_has_refused_fewer(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(worker=1, limit=2)
    refusals.total = 5
    refusals.count(3)
    assert refusals.in_a_row == 0 and not caplog.text
    refusals.count(4)
    with pytest.raises(RefusedError, match="the last 2 updates of worker 1"):
        refusals.count(5)


def test_outliers_are_not_called_nan(caplog: pytest.LogCaptureFixture) -> None:
    """They are refused, too, and count, but a user who looks for NaN would find none."""
    refusals = Refusals(worker=0, limit=2)
    with caplog.at_level(logging.WARNING):
        refusals.count(1, outlier=True)
    assert "it had a norm above --max-update-norm-ratio (1 in all)" in caplog.text
    with pytest.raises(RefusedError, match="had NaN or Inf or a norm above --max-update-norm-ratio and were refused"):
        refusals.count(2)
    refusals.count(2)
    refusals.count(3, outlier=True)
    with pytest.raises(RefusedError, match="worker 0 had a norm above --max-update-norm-ratio and were"):
        refusals.count(4, outlier=True)


def test_local_steps_are_left_out() -> None:
    with pytest.raises(RefusedError, match="the last 3 local steps of worker 3 had NaN or Inf and were left out"):
        loop = WorkerLoop(SimpleNamespace(), WorkerContext(worker=3))  # type: ignore[arg-type]
        for left_out in (True, True, False, True, True, True):
            loop.count_left_out(left_out)


def test_a_worker_that_comes_back_counts_only_what_is_refused_from_then_on(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=1, local_steps=1) as [before]:
        assert [before.push(number, math.nan).refused for number in range(3)] == [1, 2, 3]
        before.client.close()
        client = Client(
            LastingConnection(
                before.client.connection.address, before.client.connection.endpoint.token, 0, patience=10.0
            )
        )
        worker = LocalSGDWorker(client, TensorReplica([("w", theta := torch.zeros(3))]))
        worker.begin(client.join(LAYOUT, before.spec))
        for moved, in_a_row in ((1.0, 0), (math.nan, 1), (1.0, 0)):
            theta += moved
            worker.step(0.1)
            assert worker.refusals.in_a_row == in_a_row
        assert (worker.sequence, worker.refusals.total, theta.tolist()) == (6, 4, [2.0] * 3)
