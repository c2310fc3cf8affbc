"""Workers that start from compressed parameters: what they are given, what their updates do, and what stays exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from fairseq_async.algorithms import BF16, Int8
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Push, Report
from fairseq_async.records.events import read_events
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.replica import TensorReplica
from scripts.faults.thread_server import ThreadServer
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import StartServer, StartThreadServer, join_patiently, kill, lose_next_answer
from tests.helpers.thread_workers import LAYOUT, HybridJob, Worker, local_sgd
from tests.helpers.waiting import wait_until

HOSTS = ["127.0.0.1", "127.0.0.2"]  # shared memory; as between machines


def send(worker: Worker, sequence: int, values: list[float], base: int) -> None:
    """Adds these values to the parameters."""
    update = torch.tensor(values)
    report = Report(local_steps=1, step_seconds=0.0)
    assert worker.client.push(lambda slot: slot.copy_(-update), Push(sequence, base, 1.0, report)).taken


def start(worker: Worker) -> list[float]:
    values = torch.empty(LAYOUT.size)
    worker.client.pull(values.copy_, starts=True)
    return values.tolist()


def exact(worker: Worker) -> list[float]:
    values = torch.empty(LAYOUT.size)
    worker.client.pull(values.copy_)
    return values.tolist()


@pytest.mark.parametrize("host", HOSTS)
def test_work_starts_from_rounded_parameters_and_the_servers_own_stay_exact(tmp_path: Path, host: str) -> None:
    values = [1.0 + 2**-10, -0.3, 127.0]
    parameters = torch.tensor(values)
    payload = BF16().encode(parameters)
    with local_sgd(tmp_path, workers=1, host=host, compress={"pull": "bf16"}) as [worker]:
        send(worker, 0, values, 0)
        assert start(worker) == parameters.bfloat16().tolist() and exact(worker) == parameters.tolist()
        assert start(worker) == parameters.bfloat16().tolist()
        send(worker, 1, [0.0, 0.0, 0.0], 1)
        assert exact(worker) == parameters.tolist()
        send(worker, 2, [0.0, 0.0, 0.0], 2)
    first, second, third = read_events(tmp_path / "events.jsonl")
    assert (first.bytes_received, first.start_payload) == (0, None)
    assert second.bytes_received == 2 * len(payload) + 12  # two payloads, and the parameters once in fp32
    assert second.start_payload == f"{int.from_bytes(payload[20:24], 'little'):08x}"
    assert (third.bytes_received, third.start_payload) == (12, None)


@pytest.mark.parametrize("host", HOSTS)
def test_a_validation_between_two_starts_changes_nothing_of_what_changes_are_added_to(
    tmp_path: Path, host: str
) -> None:
    starts = []
    for validates in (False, True):
        run_dir = tmp_path / f"validates-{validates}"
        with local_sgd(run_dir, workers=1, host=host, compress={"pull": "e3m0"}) as [worker]:
            own = []
            for number, values in enumerate(([1.3, -0.7, 100.0], [0.11, 0.7, -3.0], [0.0, 0.05, 7.0])):
                send(worker, number, values, number)
                if validates:
                    exact(worker)
                own.append(start(worker))
            starts.append(own)
    assert starts[0] == starts[1] and starts[0][1] != starts[0][0]


@pytest.mark.parametrize("host", HOSTS)
def test_all_workers_are_given_the_same_and_what_int8_loses_comes_with_the_next_version(
    tmp_path: Path, host: str
) -> None:
    with local_sgd(tmp_path, workers=2, host=host, compress="none,pull=int8") as [one, other]:
        send(one, 0, [127.0, 0.4, -0.4], 0)
        assert start(one) == start(other) == start(one) == [127.0, 0.0, 0.0]
        send(one, 1, [0.0, 0.0, 0.0], 1)
        assert start(other) == start(one) == [127.0, 1.0, -1.0]
        assert exact(one) == exact(other) == pytest.approx([127.0, 0.4, -0.4])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("codec", ["pull=bf16", "e3m0,pull=int8:block=2"])
def test_small_steps_of_local_sgd_add_up_though_no_start_shows_them(tmp_path: Path, host: str, codec: str) -> None:
    """Steps of 2^-13 on parameters of 3: below the last bit of bf16, and a level of int8."""
    with local_sgd(tmp_path, workers=1, host=host, compress=codec, local_steps=1) as [given]:
        send(given, 0, [3.0, -3.0, 3.0], 0)
        before = exact(given)  # the update has been compressed too
        weight = Parameter(torch.zeros(3))
        worker = LocalSGDWorker(given.client, TensorReplica([("w", weight)]))
        worker.begin(replace(given.client.join(LAYOUT, given.spec), sequence=1))
        for _ in range(6):
            weight.data.add_(2**-13)
            worker.step(0.0)
        assert worker.sequence == 7
        assert exact(given) == pytest.approx([each + 6 * 2**-13 for each in before], abs=1e-6)


@pytest.mark.parametrize("host", HOSTS)
def test_parameters_whose_answer_was_lost_come_again_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with local_sgd(tmp_path, workers=2, host=host, compress="pull=int8") as [one, other]:
        send(one, 0, [127.0, 0.4, -0.4], 0)
        other.client.connection.patience = 10.0
        lose_next_answer(other, monkeypatch)
        assert start(other) == [127.0, 0.0, 0.0]
        send(one, 1, [0.0, 0.0, 0.0], 1)
        assert start(one) == [127.0, 1.0, -1.0]


def test_a_hybrid_worker_computes_from_what_it_was_given_and_ends_with_the_servers_own(
    start_thread_server: StartThreadServer,
) -> None:
    server: ThreadServer = start_thread_server(1)
    codec = {"pull": {"codec": "int8", "block": 6}}
    client = join_patiently(server, 0, updates_per_step=2, last_version=2, compress=codec)
    job = HybridJob(client)
    step = torch.tensor([[-126.0, 0.0], [-0.4, 0.0]]), torch.tensor([0.0, 0.4])
    given = []
    while not job.worker.finished:
        job.backward(*(each.clone() for each in step))
        job.worker.scale_into_slot(1.0)
        job.worker.step(1, None)
        given.append(job.parameters())
    # 1 is what it began with; versions 1 and 2 are 127 and 253 in the first place, …
    assert given[0] == [1.0] * 6
    first = torch.tensor([127.0, 1.0, 1.4, 1.0, 1.0, 0.6])
    assert given[1] == given[2] == Int8(6).decode(Int8(6).encode(first), 6).tolist() == [127, 1, 1, 1, 1, 1]
    assert given[3] == pytest.approx([253.0, 1.0, 1.8, 1.0, 1.0, 0.2])
    events = list(read_events(server.service.run_dir / "events.jsonl"))
    assert len({event.start_payload for event in events}) == 2
    assert events[2].bytes_received == len(Int8(6).encode(first))


def test_a_server_that_died_gives_the_next_versions_as_it_would_have(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(workers=1)
    codec = {"pull": {"codec": "int8", "block": 6}}
    client = join_patiently(server, 0, compress=codec, snapshot_seconds=1e-3)
    job = HybridJob(client)
    job.backward(torch.tensor([[-126.0, -0.4], [0.0, 0.0]]), torch.zeros(2))
    seen = []
    for number in range(4):
        if number == 2:
            wait_until(lambda: snapshot_versions(tmp_path)[-1:] == [2])
            kill(server)
        job.worker.scale_into_slot(1.0)
        job.worker.step(1, None)
        seen.append(job.parameters()[1])
        job.backward(torch.zeros(2, 2), torch.zeros(2))
    # 1.4 at levels of 1, with what was lost before: 1.4, 1.8, 1.2, 1.6
    assert seen == [1.0, 2.0, 1.0, 2.0]


def test_a_worker_is_told_of_another_codec_for_parameters(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=1, compress="pull=int8") as [worker]:
        spec: MethodSpec = worker.spec
        assert spec.compress.pull is not None and spec.compress.push is None
        assert worker.client.compressor is None and worker.client.memory.shared is not None
        assert not worker.client.memory.shared.publishes
