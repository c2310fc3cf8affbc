"""A worker's gradients on their way into its slot."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.server import ServerClient
from fairseq_async.worker.gradients import GradientWorker
from tests.test_faults import Serve, Start, enter, kill, serve, snapshots, start, wait_until

__all__ = ["serve", "start"]  # fixtures


class Job:
    """A worker with the parameters of the tests' layout, which are 1 at the server's start; its learning rate is 1."""

    def __init__(self, client: ServerClient) -> None:
        self.weight, self.bias = Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))
        self.worker = GradientWorker(client, [("weight", self.weight), ("bias", self.bias)], max_refused=3)
        self.worker.begin({"finished": False, "sequence": 0, "refused": 0, "learning_rate": 1.0})

    def backward(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight.grad, self.bias.grad = weight, bias

    def parameters(self) -> list[float]:
        return [*self.weight.detach().flatten().tolist(), *self.bias.detach().tolist()]


def test_scaled_gradients_are_in_the_slot_and_arrive(serve: Serve) -> None:
    client = enter(serve(1), 0)
    job = Job(client)
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


def test_a_worker_that_was_not_announced_draws_from_a_shard_that_is_there(serve: Serve) -> None:
    server = serve(2)
    enter(server, 0)
    joined = [Job(enter(server, None)) for _ in range(3)]
    assert [job.worker.shard for job in joined] == [0, 1, 0]


def test_a_gradient_is_not_scaled_into_a_slot_that_the_server_still_reads(serve: Serve) -> None:
    job = Job(enter(serve(1), 0, updates_per_step=50))
    for value in range(50):
        job.backward(torch.full((2, 2), 2.0 * value), torch.full((2,), 2.0 * value))
        job.worker.scale_into_slot(0.5)
        job.worker.step(1, None)
    assert job.parameters() == pytest.approx([1.0 - sum(range(50)) / 50] * 6)


def test_a_gradient_that_was_scaled_for_a_server_that_died_comes_to_the_next(start: Start, tmp_path: Path) -> None:
    server = start(workers=1)
    client = enter(server, 0, snapshot_seconds=1e6)
    job = Job(client)
    wait_until(lambda: snapshots(tmp_path) == [0])
    job.backward(torch.ones(2, 2), torch.ones(2))
    job.worker.scale_into_slot(0.5)
    kill(server)
    job.worker.step(1, None)
    assert job.parameters() == [0.5] * 6
