"""Workers whose model is on a GPU, a fake one that counts, with a real server."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.replica import TensorReplica
from scripts.faults.thread_server import ThreadServer
from tests.helpers.fake_cuda import FakeCuda, install
from tests.helpers.fragments import Descent, streaming
from tests.helpers.server_client import StartThreadServer, join_patiently
from tests.helpers.thread_workers import LAYOUT, HybridJob, local_sgd


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_exchange_of_a_gradient_is_one_transfer_each_way(
    start_thread_server: StartThreadServer, cuda: FakeCuda, ahead: bool
) -> None:
    job = HybridJob(join_patiently(start_thread_server(1), 0))
    for number in range(1, 4):
        job.backward(torch.full((2, 2), 0.25), torch.full((2,), 0.5))
        before = cuda.to_memory, cuda.to_gpu, cuda.event_waits
        with cuda:  # which sees numbers that are read
            if ahead:
                job.worker.write_ahead()
                assert cuda.late == 1
            job.worker.step(1, None)
        assert job.parameters() == [1 - 0.25 * number] * 4 + [1 - 0.5 * number] * 2
        assert (cuda.to_memory, cuda.to_gpu) == (before[0] + 1, before[1] + 1)
        assert cuda.event_waits == before[2] + 2
    assert (cuda.synchronisations, cuda.unpinned, cuda.late) == (0, 1, 0)  # the first parameters came before pinning


def test_a_gradient_that_was_begun_for_another_slot_is_written_again(
    start_thread_server: StartThreadServer, cuda: FakeCuda
) -> None:
    job = HybridJob(join_patiently(start_thread_server(1), 0))
    job.backward(torch.ones(2, 2), torch.ones(2))
    job.worker.write_ahead(0.5)
    elsewhere = torch.zeros(6)
    job.worker.write(elsewhere, 0.5)
    assert elsewhere.tolist() == [0.5] * 6


def test_an_exchange_of_local_steps_is_one_transfer_each_way(tmp_path: Path, cuda: FakeCuda) -> None:
    with local_sgd(tmp_path, workers=1) as (joined,):
        theta = torch.zeros(3)
        worker = LocalSGDWorker(joined.client, TensorReplica([("w", theta)]))
        assert worker.replica.layout == LAYOUT
        worker.begin(joined.welcome)
        worker.exchanges.run(None)  # pins
        before = cuda.to_memory, cuda.to_gpu
        theta.add_(1.0)
        worker.count(0.1, None)
        worker.exchanges.run(None)
        assert theta.tolist() == [1.0] * 3
        assert (cuda.to_memory, cuda.to_gpu) == (before[0] + 1, before[1] + 1)
        assert cuda.synchronisations == 0


def test_a_fragment_is_read_when_it_is_sent_and_read_and_written_when_it_is_taken_back(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    with ThreadServer(1, tmp_path, build=local_sgd_main.build) as server:
        worker = Descent(Client(LastingConnection(server.address, server.token, 0)), streaming(delay=1), 1)
        for _ in range(5):  # fragments are sent after every second step; the first pins
            worker.step()
        before = cuda.to_memory, cuda.to_gpu, cuda.unpinned
        with cuda:
            assert not worker.step()
            assert (cuda.to_memory, cuda.to_gpu) == (before[0] + 1, before[1])
            assert worker.step()
            assert (cuda.to_memory, cuda.to_gpu) == (before[0] + 2, before[1] + 1)
        assert (cuda.late, cuda.unpinned) == (0, before[2])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_exchanged_is_pinned_where_it_is_in_memory(asynchronous: bool) -> None:
    """A server on a GPU shares memory of that, which is reached as it is."""
    slot, device = torch.zeros(2), MagicMock(asynchronous=asynchronous)
    client = SimpleNamespace(exchanged={"slot": slot, "published": SimpleNamespace(is_cpu=False)})
    worker: Any = SimpleNamespace(replica=SimpleNamespace(device=device), client=client)
    AsyncWorker.pin_exchanged(worker)
    assert device.pin.mock_calls == [call("slot", slot)] * asynchronous
