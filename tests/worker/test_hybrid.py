"""A worker's gradients on their way into its slot."""

import math
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from fairseq_async.errors import RefusedError
from fairseq_async.protocol import Layout, Push, Report, Status
from fairseq_async.records.events import read_events
from fairseq_async.worker.divided import DividedReplica
from fairseq_async.worker.hybrid import HybridWorker
from scripts.faults.thread_server import ThreadServer
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import StartServer, StartThreadServer, join_patiently, kill
from tests.helpers.thread_workers import HybridJob
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


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_loss_scale_is_no_part_of_what_is_written_whole_or_by_parts(is_divided: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = gradient = torch.tensor([2.0, 4.0])
    named, divided = [("weight", parameter)], None
    if is_divided:
        divided = DividedReplica(Layout.of(named), [0], lambda: [parameter.detach()], lambda: [gradient])
    slot = torch.zeros(2)
    HybridWorker(MagicMock(), named, divided=divided).write(slot, factor=0.25)
    assert slot.tolist() == [0.5, 1.0]


def test_the_norm_of_what_came_behind_the_message_is_measured_whatever_its_sender_says(tmp_path: Path) -> None:
    with ExitStack() as ends:
        server = ThreadServer(1, tmp_path, "127.0.0.2")
        ends.callback(server.stop)
        client = join_patiently(server, 0)
        answer = client.push(lambda slot: slot.fill_(math.nan), Push(0, 0, 1.0, norm=1.0))
        assert answer.status is Status.REFUSED


def test_an_update_that_lacks_other_tensors_than_the_models_is_refused(start_thread_server: StartThreadServer) -> None:
    client = join_patiently(start_thread_server(1), 0)
    job = HybridJob(client)
    with pytest.raises(RefusedError, match="lacks gradients of parameters that the model does not have"):
        client.push(lambda slot: None, Push(0, 0, 1.0, Report(missing="4")))
    job.backward(torch.ones(2, 2))
    job.worker.step(1, None)
    assert job.parameters() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_worker_that_was_not_announced_draws_from_a_shard_that_is_there(
    start_thread_server: StartThreadServer,
) -> None:
    server = start_thread_server(2)
    join_patiently(server, 0)
    joined = [HybridJob(join_patiently(server, None)) for _ in range(3)]
    assert [job.worker.shard for job in joined] == [0, 1, 0]


def test_an_update_says_how_far_ahead_its_worker_has_started_unless_that_has_pulled_since(
    start_thread_server: StartThreadServer,
) -> None:
    server = start_thread_server(1)
    job = HybridJob(join_patiently(server, 0))
    for pulls in (False, True):
        job.worker.look_ahead = 1.5
        if pulls:
            job.worker.pull()
        job.backward(torch.ones(2, 2), torch.ones(2))
        job.worker.step(1, None)
    assert [event.look_ahead for event in read_events(server.service.run_dir / "events.jsonl")] == [1.5, None]


def test_the_empty_micro_batches_of_a_gradient_count_in_its_step_and_not_in_its_data(
    start_thread_server: StartThreadServer,
) -> None:
    """The last step of a pass is a whole one, whatever was left for it."""
    server = start_thread_server(1)
    job = HybridJob(join_patiently(server, 0))
    job.worker.drawn = 0
    for micro_batches, empty in ((3, 0), (2, 1), (0, 3), (0, 0)):
        job.worker.micro_batches, job.worker.empty = micro_batches, empty
        job.backward(torch.ones(2, 2), torch.ones(2))
        job.worker.step(1, None)
    events = read_events(server.service.run_dir / "events.jsonl")
    assert [event.micro_batches for event in events] == [3, 3, 3, None] and job.worker.drawn == 5


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


def test_a_worker_that_was_replaced_writes_nothing_into_its_successors_slot(
    start_thread_server: StartThreadServer,
) -> None:
    """It has stood still for so long that the server took it for gone."""
    server = start_thread_server(2)
    join_patiently(server, 0)
    late = join_patiently(server, 1)
    late.connection.channel.connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: 1 not in server.service.peers)
    successor = join_patiently(server, 1)
    successor.slot.fill_(7.0)
    with suppress(RefusedError):  # it is told so where both would write to the same memory
        late.prepare(lambda slot: slot.fill_(-1.0))
    assert torch.equal(successor.slot, torch.full_like(successor.slot, 7.0))
