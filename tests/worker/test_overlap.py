"""Local SGD whose worker goes on computing while the server's answer is on its way."""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options.config import OuterSGDOptions
from fairseq_async.protocol import Push, PushReply
from fairseq_async.server.programs.local_sgd_main import build
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica
from scripts.faults.thread_server import ThreadServer

STEPS = 3  # of a round


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Set when the server's answers may arrive."""
    event = threading.Event()
    yield event
    event.set()  # the thread that waits for it must end


def joined(server: ThreadServer, workers: int, shards: list[int], answer: threading.Event) -> LocalSGDWorker:
    """A worker in the run, whose updates leave when ``answer`` is set."""
    options = OuterSGDOptions(local_steps=STEPS, outer_lr=1.0, overlap=True)
    replica = TensorReplica([("theta", torch.zeros(2))])
    local = local_sgd_worker(Client(LastingConnection(server.address, server.token, 0)), replica, options)
    push = local.client.push

    def held(write: Callable[[Tensor], object], message: Push) -> PushReply:
        assert answer.wait(30)
        return push(write, message)

    local.client.push = held  # type: ignore[method-assign]
    local.join(local_sgd_spec(options, workers, shards, None, {}))
    local.begin(local.bring_parameters(None))
    return local


@pytest.mark.parametrize(("workers", "shards"), [(1, [64]), (2, [64]), (1, [])], ids=["alone", "of two", "no shards"])
def test_steps_in_flight_draw_the_next_batches_and_move_the_schedule(
    answer: threading.Event, tmp_path: Path, workers: int, shards: list[int]
) -> None:
    """The first round is sent after step 3 and answered after step 6, of 9: no batch comes twice, and progress grows by
    the same with each step, in mean local steps of a worker."""
    server = ThreadServer(workers, tmp_path / "run", build=build)
    try:
        local = joined(server, workers, shards, answer)
        local.clock = count().__next__
        batches, progress, taken = [], [], []
        for step in range(9):
            batches.append(local.offset + local.done)
            progress.append(local.progress)
            if step == 5:
                answer.set()
            local.tokens += 10.0 + step
            local.epochs += 0.5
            taken.append(local.step(seconds=0.01))
            if step == 5:  # what was counted in flight belongs to the next round
                assert (local.tokens, local.epochs, local.done) == (13.0 + 14.0 + 15.0, 1.5, 3)
                assert (local.last["steps_in_flight"], local.last["waiting_seconds"]) == (3.0, 1.0)
                assert local.last["local_steps"] == STEPS and local.last["norm"] == 0.0
        assert taken[:6] == [False] * 5 + [True]
        if shards:
            assert batches == list(range(9))
        assert progress == [step / workers for step in range(9)]
        local.settle()
        local.client.leave(finished=False)
    finally:
        answer.set()
        server.stop()
