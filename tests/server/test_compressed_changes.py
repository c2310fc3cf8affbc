"""What a worker lacks of the parameters, encoded: server and worker keep the same copy, and no error adds up."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import E3M0, FragmentedRule, Int8, NesterovMomentum, Update, fragments_of
from fairseq_async.method.spec import local_sgd_spec
from fairseq_async.options import compression
from fairseq_async.options.config import ServerOptions
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.server.compressed_changes import CompressedChanges
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.server.slots import Slots
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.fragments import Descent, streaming
from tests.helpers.mortal import MortalServer
from tests.helpers.server_client import lose_next_answer

SIZES = [2, 3]
E3M0_STARTS = compression.parse("pull=e3m0").pull
assert E3M0_STARTS is not None


def plain() -> NesterovMomentum:
    """Subtracts what it gets."""
    return NesterovMomentum(lr=1.0, momentum=0.0, workers=1)


class Server:
    """A server whose parameters are moved, and what each worker has of them."""

    def __init__(self, first: list[float], fragments: int = 1, looks_ahead: bool = False) -> None:
        self.parameters = torch.tensor(first)
        parts = fragments_of(SIZES, fragments)
        rule = plain() if fragments == 1 else FragmentedRule(parts, [plain() for _ in parts])
        self.server = ParameterServer(self.parameters, rule, keeps_last_step=looks_ahead)
        assert E3M0_STARTS is not None
        self.changes = CompressedChanges(E3M0_STARTS, parts)

    def move(self, values: list[float]) -> None:
        sequence = self.server.sequences.get(0, -1) + 1
        self.server.push(Update(0, sequence, self.server.version, 1.0, -torch.tensor(values)))

    def give(self, worker: int, sequence: int | None = None, look_ahead: float = 0.0) -> Tensor | None:
        starts = self.changes.of(worker, sequence)
        payload = None if starts is None else starts.payload(self.server, look_ahead)
        return None if starts is None or payload is None else starts.decode(payload).clone()

    def take(self, worker: int) -> None:
        self.changes.note_taken(worker, self.parameters, None)


def lossy(values: Tensor) -> Tensor:
    return E3M0().decode(E3M0().encode(values), values.numel())


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5), min_size=1, max_size=12), st.data())
def test_each_worker_has_the_parameters_but_for_what_its_last_payload_has_lost(
    steps: list[list[float]], data: st.DataObject
) -> None:
    """In float64, of the differences alone; whoever asks when."""
    it = Server([3.0, -1.0, 0.25, 0.0, 1e-3])
    has = {}
    for worker in (0, 1):
        it.take(worker)
        has[worker] = it.parameters.double().clone()
    for step in steps:
        it.move(step)
        for worker in data.draw(st.sets(st.sampled_from([0, 1]))):
            change = (it.parameters.double() - has[worker]).float()
            has[worker] += lossy(change).double()
            given = it.give(worker)
            assert given is not None
            torch.testing.assert_close(given.double(), has[worker], rtol=1e-6, atol=1e-6)
            assert float((given - it.parameters).abs().max()) <= 0.34 * float(change.abs().max()) + 1e-6


def test_parameters_that_stay_are_come_to_in_the_end() -> None:
    it = Server([0.0] * 5)
    it.take(0)
    it.move([1.0, -0.3, 0.07, 0.5, 1e-3])
    for _ in range(12):
        given = it.give(0)
    assert given is not None
    torch.testing.assert_close(given, it.parameters, rtol=1e-5, atol=1e-6)


def test_a_worker_of_which_nothing_is_known_is_given_int8() -> None:
    it = Server([127.0, 2.4, 3.0, 4.0, 5.0])
    assert it.give(0).tolist() == [127.0, 2.0, 3.0, 4.0, 5.0]  # type: ignore[union-attr]
    assert torch.equal(it.give(0), it.parameters)  # type: ignore[arg-type]
    it.changes.remove_worker(0)
    assert it.give(0).tolist() == [127.0, 2.0, 3.0, 4.0, 5.0]  # type: ignore[union-attr]


def test_of_a_fragment_that_was_given_in_fp32_changes_come_next_and_of_no_other() -> None:
    it = Server([1.0, 2.0, 3.0, 4.0, 5.0], fragments=2)
    it.changes.note_taken(0, it.parameters[2:], 3)
    assert [starts.adds for turn in range(4) if (starts := it.changes.of(0, turn))] == [False, True] * 2
    it.move([1.0, 0.5])
    it.move([2.0, 4.0, 8.0])
    starts = it.changes.of(0, 1)
    assert starts is not None and (payload := starts.payload(it.server)) is not None
    assert E3M0().decode(payload.numpy().data, 3).tolist() == [2.0, 4.0, 8.0], "what it has stays as it was given"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_with_nan_have_no_payload_and_those_after_them_have(bad: float) -> None:
    it = Server([1.0, 2.0, 3.0, 4.0, 5.0])
    it.take(0)
    it.parameters[1] = bad
    assert it.give(0) is None
    it.take(0)  # they are given in fp32
    it.parameters[1] = 2.0
    assert it.give(0) is None  # what the worker has is no number
    it.take(0)
    it.parameters[0] = 3.0
    assert torch.equal(it.give(0), it.parameters)  # type: ignore[arg-type]


def test_what_lies_ahead_is_what_the_worker_has_then() -> None:
    it = Server([0.0] * 5, looks_ahead=True)
    it.take(0)
    it.move([1.0, 0.0, 0.0, 0.0, 0.0])
    given = it.give(0, look_ahead=3.0)
    assert given is not None and given.tolist() == [4.0, 0.0, 0.0, 0.0, 0.0]
    assert it.give(0).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]  # type: ignore[union-attr]


def test_a_fragment_is_encoded_by_itself_and_several_at_once_are_not() -> None:
    it = Server([0.0] * 5, fragments=2)
    it.take(0)
    assert it.changes.of(0, None) is None
    it.move([1.0, 0.5])
    it.move([2.0, 4.0, 8.0])
    assert it.give(0, 1).tolist() == [2.0, 4.0, 8.0]  # type: ignore[union-attr]
    assert it.give(0, 0).tolist() == [1.0, 0.5]  # type: ignore[union-attr]
    it.changes.note_taken(0, torch.tensor([7.0, 7.0]), 2)
    parts = it.changes.state_dict()["known"][0]
    assert {turn: part.tolist() for turn, part in parts.items()} == {0: [7.0, 7.0], 1: [2.0, 4.0, 8.0]}


def test_a_worker_that_joins_again_has_nothing_of_what_was_sent_before() -> None:
    """It may be another process, and the update after which it takes parameters next may be the dead one's."""
    spec = local_sgd_spec(streaming(0, fragments=1, compress="pull=e3m0"), 2, [], ServerOptions(), {})
    slots = Slots(spec, Layout.of([("a", torch.zeros(5))]), 2)
    peers: list[Any] = [SimpleNamespace(id=worker, remote=False, channel=SimpleNamespace()) for worker in range(2)]
    for peer in peers:
        slots.open(peer)
        slots._starts.note_taken(peer.id, torch.ones(5), None)
    slots.open(peers[1])
    assert isinstance(slots._starts, CompressedChanges) and list(slots._starts._known) == [0]


def test_what_a_payload_has_of_tensors_without_a_gradient_is_not_taken() -> None:
    """A codec may round their zeros up."""
    spec = local_sgd_spec(streaming(0, fragments=1, compress="int8"), 1, [], ServerOptions(), {})
    slots, sent = (
        Slots(spec, Layout.of([("a", torch.zeros(2)), ("b", torch.zeros(3))]), 1),
        Int8().encode(torch.ones(5)),
    )
    channel: Any = SimpleNamespace(with_tensor=True, tensor_bytes=len(sent))
    peer: Any = SimpleNamespace(id=0, remote=True, channel=channel)
    slots.open(peer)
    channel.room[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    slots.unpack(peer, Push(0, 0, 1.0, Report(missing="2")))
    assert slots.update(0, 0).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


# With real servers and workers


def both_agree(worker: Descent, server: Any) -> bool:
    """On what the worker has, of all fragments of which the server knows it."""
    starts = server.service.described.slots._starts
    own = worker.local.client.receiver._reference
    assert isinstance(starts, CompressedChanges) and own is not None
    known = starts._known.get(0, {})
    return all(torch.equal(starts._fragments[turn].of(own), part) for turn, part in known.items())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ThreadServer]]:
    servers: list[ThreadServer] = []

    def begin(host: str) -> ThreadServer:
        servers.append(ThreadServer(1, tmp_path / "run", host, local_sgd_main.build))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


WAYS = [(streaming(0, fragments=1, local_steps=2, compress="e3m0,pull=e3m0")), streaming(1, compress="pull=e3m0")]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("options", WAYS, ids=["whole", "fragments"])
def test_both_sides_agree_after_each_exchange_also_where_answers_are_lost(
    start: Callable[..., ThreadServer], monkeypatch: pytest.MonkeyPatch, host: str, options: Any
) -> None:
    server = start(host)
    worker = Descent(Client(LastingConnection(server.address, server.token, 0, 30.0)), options, 1)
    compressed = 0
    for step in range(24):
        if step in (5, 9):
            lose_next_answer(worker.local, monkeypatch)
        worker.step()
        worker.local.settle()
        assert both_agree(worker, server)
        compressed += worker.local.client.receiver.payload is not None
    assert compressed > 12
    worker.local.catch_up()
    assert torch.equal(worker.theta, server.service.described.coordinator.server.parameters)
    assert worker.theta.norm() > 1


def test_a_server_that_comes_back_gives_all_parameters_anew(tmp_path: Path) -> None:
    server = MortalServer(1, tmp_path / "run", "127.0.0.1", local_sgd_main.build, [900])
    try:
        options = streaming(0, fragments=1, local_steps=2, compress="pull=e3m0", total_steps=40)
        worker = Descent(Client(LastingConnection(server.address, server.token, 0, 30.0)), options, 1)
        for _ in range(6):
            worker.step()
        server.begin_to_die()
        while not worker.local.finished:
            worker.step()
            if not worker.local.finished:
                assert both_agree(worker, server)
        assert server.lives == 2, server.places
        assert torch.equal(worker.theta, server.service.described.coordinator.server.parameters)
    finally:
        server.stop()
