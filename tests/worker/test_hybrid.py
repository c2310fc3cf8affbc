"""A worker's gradients on their way into its slot."""

from pathlib import Path

import pytest
import torch

from tests.helpers.hybrid_job import HybridJob
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import StartServer, StartThreadServer, join_patiently, kill
from tests.helpers.waiting import wait_until


def test_scaled_gradients_are_in_the_slot_and_arrive(start_thread_server: StartThreadServer) -> None:
    client = join_patiently(start_thread_server(1), 0)
    job = HybridJob(client)
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    job.backward(gradient.t())  # not contiguous; and no loss depends on the bias
    job.worker.scale_into_slot(0.25)
    assert job.weight.grad is not None and job.weight.grad.data_ptr() == client.slot.data_ptr()
    assert torch.equal(job.weight.grad, gradient.t() / 4) and job.bias.grad is None
    job.worker.step(1, None)
    assert job.parameters() == [0.75, 0.25, 0.5, 0.0, 1.0, 1.0]
    job.backward(gradient.clone(), torch.ones(2))  # as where nothing scales
    job.worker.step(1, None)
    assert job.parameters() == [-0.25, -1.75, -2.5, -4.0, 0.0, 0.0]


def test_a_worker_that_was_not_announced_draws_from_a_shard_that_is_there(
    start_thread_server: StartThreadServer,
) -> None:
    server = start_thread_server(2)
    join_patiently(server, 0)
    joined = [HybridJob(join_patiently(server, None)) for _ in range(3)]
    assert [job.worker.shard for job in joined] == [0, 1, 0]


def test_a_gradient_is_not_scaled_into_a_slot_that_the_server_still_reads(
    start_thread_server: StartThreadServer,
) -> None:
    job = HybridJob(join_patiently(start_thread_server(1), 0, updates_per_step=50))
    for value in range(50):
        job.backward(torch.full((2, 2), 2.0 * value), torch.full((2,), 2.0 * value))
        job.worker.scale_into_slot(0.5)
        job.worker.step(1, None)
    assert job.parameters() == pytest.approx([1.0 - sum(range(50)) / 50] * 6)


def test_a_gradient_that_was_scaled_for_a_server_that_died_comes_to_the_next(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(workers=1)
    client = join_patiently(server, 0, snapshot_seconds=1e6)
    job = HybridJob(client)
    wait_until(lambda: snapshot_versions(tmp_path) == [0])
    job.backward(torch.ones(2, 2), torch.ones(2))
    job.worker.scale_into_slot(0.5)
    kill(server)
    job.worker.step(1, None)
    assert job.parameters() == [0.5] * 6
