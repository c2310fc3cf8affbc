"""Compressed updates between workers and a server: what arrives, what is kept, and what a server refuses."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.algorithms import AdaComp, TopK, Update
from fairseq_async.errors import CodecError, ExchangeError, RefusedError
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options import compression
from fairseq_async.options.config import OuterSGDOptions
from fairseq_async.protocol import Push, PushReply, Report, encode
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.receipt import Status
from fairseq_async.records.events import read_events
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.slots import Slots
from fairseq_async.worker.connection.compressor import Compressor
from scripts.faults.thread_server import ThreadServer
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import (
    BOTH_WAYS,
    StartServer,
    StartThreadServer,
    join_patiently,
    kill,
    lose_next_answer,
)
from tests.helpers.server_client import push as push_constant
from tests.helpers.thread_workers import LAYOUT, HybridJob, Worker, local_sgd
from tests.helpers.waiting import wait_until

TOP_1 = "topk:chunk=3,keep=1"


def send(worker: Worker, sequence: int, values: list[float], base: int = 0) -> PushReply:
    """Adds these values to the parameters, as far as they come through."""
    update = torch.tensor(values)
    return worker.client.push(
        lambda slot: slot.copy_(-update), Push(sequence, base, 1.0, Report(local_steps=1, step_seconds=0.0))
    )


def parameters(worker: Worker) -> list[float]:
    values = torch.empty(LAYOUT.size)
    worker.client.pull(values.copy_)
    return values.tolist()


def residual(worker: Worker) -> list[float]:
    assert worker.client.compressor is not None
    return worker.client.compressor.state_dict()["parts"][0]["feedback"]["residual"].tolist()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])  # shared memory; as between machines
def test_what_is_not_sent_is_kept_and_sent_later(tmp_path: Path, host: str) -> None:
    with local_sgd(tmp_path, workers=1, host=host, compress=TOP_1) as [worker]:
        assert send(worker, 0, [4.0, 3.0, -1.0]).taken
        assert parameters(worker) == [4.0, 0.0, 0.0] and residual(worker) == [0.0, -3.0, 1.0]
        send(worker, 1, [4.0, 3.0, -1.0], base=1)
        assert parameters(worker) == [4.0, 6.0, 0.0] and residual(worker) == [-4.0, 0.0, 2.0]
    first, second = read_events(tmp_path / "events.jsonl")
    payload = TopK(3, 1).encode(torch.tensor([-4.0, -3.0, 1.0]))
    assert (first.bytes_sent, first.norm, first.residual_norm) == (len(payload), 4.0, 0.0)
    assert first.payload == f"{int.from_bytes(payload[20:24], 'little'):08x}"
    assert second.bytes_received == 12 and second.residual_norm == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize(
    "codec",
    ["bf16", "int8:block=2", "e3m0", "topk", "adacomp:bin_size=2", "adacomp:bin_size=2,scale=bin", "dqsgd:bits=2"],
)
def test_every_codec_moves_the_parameters_by_what_it_decodes(tmp_path: Path, codec: str) -> None:
    options = compression.parse(codec).push
    assert options is not None
    with local_sgd(tmp_path, workers=1, compress={"push": codec}) as [worker]:
        send(worker, 0, [0.3, -0.7, 0.1])
        alone = Compressor(options, worker.spec, LAYOUT, worker=0)
        _, payload = alone.encode(Push(0, 0, 1.0), torch.tensor([-0.3, 0.7, -0.1]))
        assert payload is not None
        arrived = compression.build(options).decode(payload.numpy().tobytes(), 3)
        assert parameters(worker) == (-arrived).tolist() and any(parameters(worker))


def test_each_worker_update_and_seed_draws_random_numbers_of_its_own() -> None:
    update = torch.linspace(-1.0, 1.0, 300)

    def sent(worker: int = 0, sequence: int = 0, seed: int = 0) -> bytes:
        options = OuterSGDOptions(compress="dqsgd:bits=2", seed=seed)
        spec, layout = local_sgd_spec(options, 2, [], None, {}), Layout.of([("w", update)])
        assert options.compress.push is not None
        _, payload = Compressor(options.compress.push, spec, layout, worker).encode(Push(sequence, 0, 1.0), update)
        assert payload is not None
        return payload.numpy().tobytes()

    assert sent() == sent() and len({sent(), sent(worker=1), sent(sequence=1), sent(seed=1)}) == 4


def test_an_update_with_nan_is_refused_and_leaves_the_residual(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=1, compress=TOP_1) as [worker]:
        send(worker, 0, [4.0, 3.0, 0.0])
        answer = send(worker, 1, [1.0, math.nan, 0.0], base=1)
        assert answer.status is Status.REFUSED and answer.refused == 1 and not answer.taken
        assert residual(worker) == [0.0, -3.0, 0.0] and parameters(worker) == [4.0, 0.0, 0.0]
        send(worker, 2, [1.0, 0.0, 0.0], base=1)
        assert parameters(worker) == [4.0, 3.0, 0.0]


def test_a_residual_waits_for_an_update_with_weight(tmp_path: Path) -> None:
    """Behind a barrier a worker without a batch sends a gradient of weight 0, which changes nothing."""
    with local_sgd(tmp_path, workers=1, compress=TOP_1) as [worker]:
        compressor = worker.client.compressor
        assert compressor is not None
        for push in (Push(0, 0, 2.0), Push(1, 1, 0.0)):
            _, payload = compressor.encode(push, torch.tensor([4.0, 3.0, 0.0]) * push.weight)
            compressor.settle(taken=True)
        assert payload is not None and not compressor.decode(payload, 3, push).any()
        assert residual(worker) == [0.0, 6.0, 0.0]


def test_an_update_that_is_too_stale_goes_back_into_the_residual(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1, staleness_limit=0) as [one, other]:
        send(one, 0, [1.0, 0.0, 0.0])
        late = send(other, 0, [0.0, 2.0, 1.0])
        assert late.status is Status.STALE and not late.taken
        assert residual(other) == [0.0, -2.0, -1.0]
        assert send(other, 1, [0.0, 0.0, 0.5], base=1).taken
        assert parameters(other) == [1.0, 2.0, 0.0] and residual(other) == [0.0, 0.0, -1.5]


@pytest.mark.parametrize("stale", [False, True])
def test_an_update_whose_answer_was_lost_counts_once_and_as_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1, staleness_limit=0) as [one, other]:
        if stale:
            send(one, 0, [1.0, 0.0, 0.0])
        other.client.connection.patience = 10.0
        lose_next_answer(other, monkeypatch)
        answer = send(other, 0, [0.0, 2.0, 1.0])
        assert answer.status is Status.DUPLICATE and answer.taken is not stale
        assert residual(other) == ([0.0, -2.0, -1.0] if stale else [0.0, 0.0, -1.0])
        assert parameters(other) == ([1.0, 0.0, 0.0] if stale else [0.0, 2.0, 0.0])


def test_a_server_remembers_over_a_restart_which_last_update_it_did_not_take() -> None:
    def server() -> ParameterServer:
        return ParameterServer(torch.zeros(1), _Add())

    before, after = server(), server()
    before.push(Update(0, 0, 0, 1.0, torch.tensor([math.nan])))
    before.push(Update(1, 0, 0, 1.0, torch.ones(1)))
    after.load_state_dict(before.state_dict())
    again = [after.push(Update(worker, 0, 0, 1.0, torch.ones(1))) for worker in (0, 1)]
    assert [receipt.status for receipt in again] == [Status.DUPLICATE] * 2
    assert [after.takes(receipt) for receipt in again] == [False, True]


class _Add:
    momentum_buffer = None

    def moves_parameters(self, ahead: int = 0) -> bool:
        return True

    def apply(self, parameters: torch.Tensor, update: Update) -> bool:
        parameters.add_(update.delta)
        return True

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"nothing of the kind", "header"),
        (TopK(3, 2).encode(torch.ones(3)), "parameters"),
        (TopK(3, 1).encode(torch.ones(2)), "3 were expected"),
        (None, "without its tensor"),
    ],
)
def test_a_payload_that_is_none_is_refused_in_one_line_and_the_server_goes_on(
    tmp_path: Path, payload: bytes | None, said: str
) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1) as [one, other]:
        behind = None if payload is None else torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        one.client.connection.channel.send(encode(Push(0, 0, 1.0, Report(local_steps=1, step_seconds=0.0))), behind)
        with pytest.raises(RefusedError, match=said):
            one.client.connection.channel.answer(PushReply)
        assert send(other, 0, [1.0, 0.0, 0.0]).taken
        assert send(one, 0, [1.0, 0.0, 0.0]).taken and parameters(one) == [2.0, 0.0, 0.0]


def test_a_payload_of_other_tensors_than_the_models_is_refused_before_it_is_looked_at(tmp_path: Path) -> None:
    """A tensor of no values would cost its sender 12 bytes, and the server more time than that."""
    layout, codec = Layout.of([("a", torch.zeros(300)), ("b", torch.zeros(300))]), AdaComp(500)
    with local_sgd(tmp_path, workers=1, compress="adacomp") as [worker]:
        slots = Slots(worker.spec, layout, 1)
    channel = SimpleNamespace(with_tensor=True)
    peer: Any = SimpleNamespace(channel=channel, remote=True, id=0)
    slots.open(peer)
    for sizes in ((300, 300), (299, 301), (300, 300, *[0] * 50)):
        sent = codec.encode(torch.ones(600), sizes=sizes)
        channel.tensor_bytes = len(sent)
        channel.room[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        if sizes == (300, 300):
            slots.unpack(peer, Push(0, 0, 1.0))
            assert slots.update(0, 0).tolist() == [1.0] * 600
        else:
            with pytest.raises(CodecError, match="tensors"):
                slots.unpack(peer, Push(1, 0, 1.0))


def test_more_bytes_than_any_payload_has_end_the_connection(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1) as [one, other]:
        one.client.connection.channel.send(
            encode(Push(0, 0, 1.0, Report(local_steps=1, step_seconds=0.0))), torch.zeros(1000)
        )
        with pytest.raises(ExchangeError):
            one.client.connection.channel.answer(PushReply)
        assert send(other, 0, [1.0, 0.0, 0.0]).taken


def test_a_worker_with_another_codec_is_told_so(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1) as [one, other]:
        spec = replace(one.spec, options={**one.spec.options, "compress": {"push": {"codec": "bf16"}}})
        other.client.connection.channel.close()
        other.client.connection.patience = 10.0
        with pytest.raises(RefusedError, match="another --compress than the others"):
            other.client.join(LAYOUT, spec)


def test_gradients_that_are_only_added_are_answered_early_and_all_of_them_arrive(
    start_thread_server: StartThreadServer,
) -> None:
    server: ThreadServer = start_thread_server(1)
    codec = {"push": {"codec": "topk", "chunk": 6, "keep": 2}}
    client = join_patiently(server, 0, updates_per_step=3, compress=codec)
    job = HybridJob(client)
    for step in range(6):
        job.backward(torch.tensor([[3.0, 0.0], [2.0, 1.0]]), torch.zeros(2))
        job.worker.scale_into_slot(1.0)
        job.worker.step(1, None)
        assert job.worker.version == (step + 1) // 3
    assert client.compressor is not None
    left = client.compressor.state_dict()["parts"][0]["feedback"]["residual"]
    # 1 − the mean of three gradients, twice, but for what is left: two of the six values go with each gradient
    expected = 1.0 - (6 * torch.tensor([3.0, 0.0, 2.0, 1.0, 0.0, 0.0]) - left) / 3
    assert job.parameters() == pytest.approx(expected.tolist(), abs=0.05)
    assert push_constant(client, 6, 1.0, base=2).version == 2


@BOTH_WAYS
def test_an_update_for_a_server_that_died_comes_to_the_next_and_nothing_is_lost(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(workers=1)
    codec = {"push": {"codec": "topk", "chunk": 6, "keep": 2}}
    client = join_patiently(server, 0, compress=codec, snapshot_seconds=1e-3)
    job = HybridJob(client)
    for step in range(4):
        if step == 2:
            wait_until(lambda: snapshot_versions(tmp_path)[-1:] == [2])
            kill(server)
        job.backward(torch.tensor([[4.0, 1.0], [2.0, 0.0]]), torch.tensor([0.5, 0.0]))
        job.worker.scale_into_slot(1.0)
        job.worker.step(1, None)
    assert client.compressor is not None
    left = client.compressor.state_dict()["parts"][0]["feedback"]["residual"]
    assert job.parameters() == pytest.approx((1.0 - (4 * torch.tensor([4, 1, 2, 0, 0.5, 0]) - left)).tolist())
    assert left.any()


def test_a_residual_comes_back_only_to_its_worker_at_its_time(tmp_path: Path) -> None:
    with local_sgd(tmp_path, workers=2, compress=TOP_1) as [one, _]:
        send(one, 0, [4.0, 3.0, 0.0])
        assert one.client.compressor is not None
        state, options = one.client.compressor.state_dict(), compression.parse(TOP_1).push
        assert options is not None
        back, other = (Compressor(options, one.spec, LAYOUT, worker) for worker in (0, 1))
        assert not other.load_state_dict(state, 1) and not back.load_state_dict(state, 0)
        assert back.load_state_dict(state, 1)
        assert back.state_dict()["parts"][0]["feedback"]["residual"].tolist() == residual(one)


def test_a_run_that_goes_on_has_the_residual_without_an_update_that_came_after_its_last_step(tmp_path: Path) -> None:
    """The server has not counted that update: the worker computes it again."""
    with local_sgd(tmp_path, workers=2, compress=TOP_1, total_steps=1) as [one, other]:
        assert send(one, 0, [4.0, 3.0, 0.0]).taken and send(other, 0, [1.0, 0.0, 0.0]).finished
        assert send(one, 1, [0.0, 0.0, 5.0]).status is Status.FINISHED
        assert one.client.compressor is not None and residual(one) == [0.0, -3.0, 0.0]
        options = compression.parse(TOP_1).push
        assert options is not None
        back = Compressor(options, one.spec, LAYOUT, worker=0)
        assert back.load_state_dict(one.client.compressor.state_dict(), 1)


def test_the_last_update_of_a_run_counts_once_where_its_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_sgd(tmp_path, workers=1, compress=TOP_1, total_steps=1) as [worker]:
        worker.client.connection.patience = 10.0
        lose_next_answer(worker, monkeypatch)
        answer = send(worker, 0, [4.0, 3.0, 0.0])
        assert answer.finished and answer.status is Status.DUPLICATE and answer.taken
        assert residual(worker) == [0.0, -3.0, 0.0] and parameters(worker) == [4.0, 0.0, 0.0]


@pytest.mark.parametrize("other", ["dqsgd", "int8", "topk:chunk=3,keep=2", "bf16"])
def test_a_residual_is_sent_by_whatever_codec_the_run_goes_on_with(tmp_path: Path, other: str) -> None:
    """One that keeps none, as dqsgd, leaves it; what a codec has noted is its own."""
    options = compression.parse(other).push
    assert options is not None
    with local_sgd(tmp_path, workers=1, compress=TOP_1) as [one]:
        send(one, 0, [4.0, 3.0, 0.0])
        assert one.client.compressor is not None
        state = one.client.compressor.state_dict()
        after = Compressor(options, one.spec, LAYOUT, worker=0)
        assert after.load_state_dict(state, 1)
        _, payload = after.encode(Push(1, 1, 1.0), torch.tensor([-1.0, -1.0, 0.0]))
        assert payload is not None
        if after._parts[0].feedback is not None:
            assert after.decode(payload, 3, Push(1, 1, 1.0))[1] == pytest.approx(-4.0, rel=0.1)
        one.client.compressor.encode(Push(1, 1, 1.0), torch.tensor([0.0, 0.0, 5.0]))  # and is saved on its way
        assert after.load_state_dict(one.client.compressor.state_dict(), 1)
        assert after._parts[0].feedback is None or after._parts[0].feedback.state_dict()["update"] is None


def test_dqsgd_with_other_bits_measures_its_norm_anew(tmp_path: Path) -> None:
    four, eight = (compression.parse(f"dqsgd:bits={bits}").push for bits in (4, 8))
    assert four is not None and eight is not None
    with local_sgd(tmp_path, workers=1, compress="dqsgd:bits=4") as [one]:
        before, same, other = (Compressor(options, one.spec, LAYOUT, worker=0) for options in (four, four, eight))
        _, coarse = before.encode(Push(0, 0, 1.0), torch.ones(3))
        before.settle(taken=True)
        state = before.state_dict()
        assert same.load_state_dict(state, 1) and other.load_state_dict(state, 1)
        payloads = [each.encode(Push(1, 1, 1.0), torch.ones(3))[1] for each in (same, other)]
        assert coarse is not None and [len(each) - len(coarse) for each in payloads if each is not None] == [0, 1]


def test_the_residuals_of_all_fragments_are_measured_and_each_is_sent_with_its_own() -> None:
    """An update of weight 0 changes nothing at the server: the residual waits for the next one."""
    options = OuterSGDOptions(compress="topk:chunk=2,keep=1", fragments=2, local_steps=2)
    layout = Layout.of([("a", torch.zeros(2)), ("b", torch.zeros(2))])
    assert options.compress.push is not None
    compressor = Compressor(options.compress.push, local_sgd_spec(options, 1, [], None, {}), layout, worker=0)
    norms = []
    for sequence, (values, weight) in enumerate(
        [([9.0, 3.0], 1.0), ([8.0, 4.0], 1.0), ([0.0, 0.0], 0.0), ([0.0, 0.0], 1.0)]
    ):
        push, payload = compressor.encode(Push(sequence, 0, weight), torch.tensor(values))
        assert payload is not None
        norms.append(push.report.residual_norm)
        sent = compressor.decode(payload, 2, push).tolist()
        compressor.settle(taken=True)
        assert sent == [[9.0, 0.0], [8.0, 0.0], [0.0, 0.0], [0.0, 4.0]][sequence]
    assert norms == [0.0, 3.0, 5.0, 5.0]


def test_the_parameters_of_all_pulls_are_counted_and_those_behind_an_answer_are_of_their_time_and_kind(
    tmp_path: Path,
) -> None:
    """A pull that asks for others, or comes after another update, takes none of them."""
    report, values = Report(local_steps=1, step_seconds=0.0), torch.empty(3)
    with local_sgd(tmp_path, workers=1, host="127.0.0.2") as [worker]:
        assert parameters(worker) == parameters(worker) == [0.0] * 3
        for sequence in range(3):
            worker.client.push(lambda slot: slot.fill_(-1.0), Push(sequence, sequence, 1.0, report, pulls=sequence < 2))
            if sequence == 0:
                assert parameters(worker) == [1.0] * 3
        assert worker.client.pull(values.copy_, starts=True) == 3 and values.tolist() == [3.0] * 3
        send(worker, 3, [1.0] * 3, base=3)
    assert [event.bytes_received for event in read_events(tmp_path / "events.jsonl")] == [24, 24, 12, 12]
