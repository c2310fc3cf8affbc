"""Shards on other machines take the steps of a server that is a single process; each is a real process here."""

import math
import struct
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import NesterovMomentum, Update
from fairseq_async.errors import ExchangeError, HalfAppliedError, RefusedError
from fairseq_async.exchange.authentication import challenge, proof
from fairseq_async.exchange.channel import Channel
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import ServerOptions
from fairseq_async.protocol import Introduce, Push, Report
from fairseq_async.protocol.client_connection import Connection, Endpoint
from fairseq_async.protocol.division import host_parts
from fairseq_async.protocol.parsing import encode
from fairseq_async.protocol.receipt import Status
from fairseq_async.protocol.shard_messages import Part, Placed
from fairseq_async.records.recording import checksum
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup
from fairseq_async.server.plan import Build
from fairseq_async.server.programs import gradient_main, local_sgd_main
from fairseq_async.server.shards import calls
from fairseq_async.server.shards.build import close_shards
from fairseq_async.server.shards.held_part import HeldPart
from fairseq_async.server.shards.host import ShardHost
from fairseq_async.server.shards.part import ShardPart
from fairseq_async.server.shards.remote import HostConnector, connect_hosts
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.sharded import (
    ADAM,
    LAYOUT,
    OUTER,
    PROGRAMS,
    SIZES,
    TOKEN,
    ServedByHosts,
    ShardHosts,
    hybrid,
    options_of,
    server_options,
    shard_hosts,
)

REPORT = Report(local_steps=1, step_seconds=0.1)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardHosts]:
    """Two hosts, which hold the shards of one server after another."""
    with shard_hosts(tmp_path_factory.mktemp("hosts"), 2) as both:
        yield both


def local_sgd(server: ServerOptions, outer: str) -> MethodSpec:
    return local_sgd_spec(options_of(outer), 2, [], server, {})


@pytest.mark.parametrize(("shards", "count"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_steps_as_in_one_process(
    optimizer: str, shards: int, count: int, hosts: ShardHosts, tmp_path: Path
) -> None:
    groups = [replace(each, options=each.options | {"weight_decay": 0.01}) for each in ADAM.parameter_groups]
    inner = OptimizerSpec(optimizer, groups)
    found = []
    for given in (ServerOptions(), server_options(hosts.addresses[:count], shards)):
        with ServedByHosts(gradient_main.build, hybrid(given, inner), tmp_path) as made:
            receipts = made.push(0, 7)
            found.append((made.server.state_dict()["parameters"].clone(), made.start(1), receipts))
            assert made.server.checksum() == checksum(made.start(0))
    (alone, start, said), (divided, its_start, told) = found
    torch.testing.assert_close(divided, alone, rtol=0, atol=0)  # says how many elements differ, and by how much
    assert torch.equal(divided, alone) and torch.equal(its_start, start) and torch.equal(start, alone)
    for ours, theirs in zip(told, said, strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-5)
        assert repr(replace(ours, norm=0.0)) == repr(replace(theirs, norm=0.0))


@pytest.mark.parametrize("outer", OUTER)
def test_an_outer_rule_and_its_starts_are_those_of_one_process(outer: str, hosts: ShardHosts, tmp_path: Path) -> None:
    found = []
    for given in (ServerOptions(), server_options(hosts.addresses)):
        with ServedByHosts(local_sgd_main.build, local_sgd(given, outer), tmp_path) as made:
            receipts = made.push(0, 8)
            found.append((torch.stack([made.start(0), made.start(1, starts=True)]), receipts))
    (alone, said), (divided, told) = found
    assert torch.equal(divided, alone)
    assert getattr(options_of(outer), "start_ahead", False) != torch.equal(*alone)
    for ours, theirs in zip(told, said, strict=True):
        assert ours.cosine == pytest.approx(theirs.cosine, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_start_ahead_is_that_of_one_process(hosts: ShardHosts, tmp_path: Path) -> None:
    found = []
    for given in (ServerOptions(), server_options(hosts.addresses)):
        with ServedByHosts(gradient_main.build, hybrid(given, look_ahead="auto"), tmp_path) as made:
            made.push(0, 6)
            found.append(torch.stack([made.start(1, look_ahead=1.5), made.start(1)]))
    assert torch.equal(*found) and not torch.equal(*found[0])


@pytest.mark.parametrize("method", ["clipped", "delayed_nesterov"])
def test_shards_here_in_place_of_hosts_as_in_a_replay_have_equal_norms_and_clipping(
    method: str, hosts: ShardHosts, tmp_path: Path
) -> None:
    inner = OptimizerSpec("SGD", [ParameterGroup(list(range(len(SIZES))), {"lr": 1.0})], clip_norm=0.5)
    given = server_options(hosts.addresses)
    build: Build = gradient_main.build if method == "clipped" else local_sgd_main.build
    spec = hybrid(given, inner) if method == "clipped" else local_sgd(given, method)
    found = []
    for replayed in (False, True):
        with ServedByHosts(build, spec, tmp_path, replayed) as made:
            receipts = made.push(0, 6)
            said = [repr(replace(each, cosine=0.0)) for each in receipts]  # its last bits are of torch.dot
            found.append((made.server.state_dict()["parameters"].clone(), said))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("method", ["hybrid", "delayed_nesterov"])
def test_a_server_goes_on_from_a_state_also_with_other_hosts(method: str, hosts: ShardHosts, tmp_path: Path) -> None:
    """Also one whose shards are all here."""
    path = tmp_path / "state.pt"
    build: Build = gradient_main.build if method == "hybrid" else local_sgd_main.build

    def spec(given: ServerOptions) -> MethodSpec:
        return hybrid(given, look_ahead="auto") if method == "hybrid" else local_sgd(given, method)

    def starts(made: ServedByHosts) -> list[Tensor]:
        return [made.start(0), made.start(1, look_ahead=2.0 * (method == "hybrid"))]

    with ServedByHosts(build, spec(server_options(hosts.addresses)), tmp_path) as first:
        first.push(0, 3)  # one waits for its step
        torch.save(first.server.state_dict(), path)
        expected = starts(first)
        first.push(3, 4)
        expected += starts(first)
    for given in (server_options(hosts.addresses[::-1]), ServerOptions(server_shards="3")):
        with ServedByHosts(build, spec(given), tmp_path) as second:
            state = torch.load(path, weights_only=True)
            second.server.load_state_dict(state)
            found = starts(second)
            second.push(3, 4)
            assert all(map(torch.equal, found + starts(second), expected))


def test_a_start_ahead_of_the_first_version_is_that_version(hosts: ShardHosts, tmp_path: Path) -> None:
    """Also of one whose state has no step before it; of a state that has one, no more is kept than is needed."""
    given = server_options(hosts.addresses)
    with ServedByHosts(gradient_main.build, hybrid(given, look_ahead="auto"), tmp_path) as first:
        start = first.start(0)
        assert torch.equal(first.start(1, look_ahead=1.5), start)
        first.push(0, 4)
        whole = {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in first.server.state_dict().items()
        }
    with ServedByHosts(gradient_main.build, hybrid(given, look_ahead="off"), tmp_path) as second:
        second.server.load_state_dict(whole)
        assert torch.equal(second.start(0), whole["parameters"])
    with ServedByHosts(gradient_main.build, hybrid(given, look_ahead="auto"), tmp_path) as third:
        third.server.load_state_dict(whole | {"before_last_step": None})
        assert torch.equal(third.start(0, look_ahead=1.5), whole["parameters"])


def test_a_nan_at_one_host_keeps_the_update_out_of_all(hosts: ShardHosts, tmp_path: Path) -> None:
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        before = made.start(0)
        (receipt,) = made.push(0, 1, lambda delta: delta[-1].fill_(float("nan")))
        assert receipt.status is Status.REFUSED
        assert torch.equal(made.start(0), before)
        made.push(1, 3)
        assert not torch.equal(made.start(0), before) and torch.isfinite(made.start(0)).all()


def test_an_update_whose_part_is_at_no_host_is_refused(hosts: ShardHosts, tmp_path: Path) -> None:
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        slot = made.memory.slot(0).zero_()
        assert made.server.push(Update(0, 0, 0, 1.0, slot[made.here])).status is Status.REFUSED
        made.place(0, 0)  # of an earlier number
        assert made.server.push(Update(0, 1, 0, 1.0, slot[made.here])).status is Status.REFUSED
        made.place(0, 2)
        assert made.server.push(Update(0, 2, 0, 1.0, slot[made.here])).status is Status.APPLIED


def test_a_worker_that_claims_a_norm_and_leaves_a_host_out_is_refused(
    hosts: ShardHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on the server's machine, whose own norm counts where there are no hosts."""
    server = ThreadServer(1, tmp_path, build=local_sgd_main.build, token=TOKEN)
    client = Client(LastingConnection(server.address, TOKEN, 0))
    try:
        given = server_options(hosts.addresses)
        client.join(LAYOUT, local_sgd_spec(options_of("sgd"), 1, [], given, {}))
        client.slot.zero_()
        client.initialise(None)
        assert client.connection.lines is not None
        with monkeypatch.context() as lying:
            lying.setattr(
                client.connection.lines, "send", lambda number, slot, channel, push, own: channel.send(push, own)
            )
            assert client.push(torch.Tensor.zero_, Push(0, 0, 1.0, REPORT, norm=1.0)).status is Status.REFUSED
        assert client.push(torch.Tensor.zero_, Push(1, 0, 1.0, REPORT)).status is Status.APPLIED
        assert client.pull(lambda slot: None) == 1
        assert not client.connection.channel.companions, "there is no room for what comes before the next pull"
    finally:
        client.close()
        close_shards(server.service.described.coordinator.server.rule)
        server.stop()


def test_what_is_left_of_a_lost_connection_changes_no_update(hosts: ShardHosts, tmp_path: Path) -> None:
    """A worker is killed in the middle of an update, and started again with another batch."""
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        made.lines[0].connect()
        lost: Channel = made.lines[0].connections[0]
        half, rest = torch.full((made.remote[0].place.size,), 7.0).view(torch.uint8).split(8000)[:2]
        part = encode(Part(0))
        lost.send(part)
        lost.connection.sendall(struct.pack("!IQ", len(part), 4 * made.remote[0].place.size))
        lost.connection.sendall(part + bytes(half.numpy().data))
        made.lines[0].connections = []
        assert made.push(0, 1)[0].status is Status.APPLIED
        with suppress(OSError):
            lost.connection.sendall(bytes(rest.numpy().data))
        lost.close()
        made.push(1, 1)
        found = made.start(0)
        assert made.lines[0].connections[0].room is None, "the slot is the next update's"
    with ServedByHosts(gradient_main.build, hybrid(ServerOptions()), tmp_path) as alone:
        alone.push(0, 2)
        assert torch.equal(alone.start(0), found)


def test_the_room_of_an_update_that_has_not_come_to_its_end_is_not_used_again() -> None:
    """The connection before may still write there; of one that is whole it is, and that update is no longer there."""
    held = HeldPart(NesterovMomentum(1.0, 0.0, 1), torch.zeros(4), slice(0, 1), keeps_last_step=False)
    half = held.place_for(0)
    whole = held.place_for(0)
    held.note_placed(0, 5)
    assert half is not whole and held._update(0, 5) is whole is held.place_for(0)
    assert math.isnan(held.measure(0, 5))
    starts = [held.start(0.0, starts) for starts in (False, True)]
    assert all(start is not held.parameters for start in starts), "they are sent while the next update is applied"


def test_a_worker_that_lies_loses_its_connection_and_no_other(hosts: ShardHosts, tmp_path: Path) -> None:
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        finish = calls.encode(calls.Call("finish", []))
        for lie in (encode(Placed(0)), finish, b"{}", b'{"kind": "part", "sequence": -1}', "long", "unannounced"):
            made.lines[1].open(made.memory.slot(1))
            channel: Channel = made.lines[1].connections[0]
            with pytest.raises(ExchangeError):
                if isinstance(lie, bytes):
                    channel.send(lie)
                else:
                    part = made.remote[0].place.of(torch.zeros(LAYOUT.size))
                    channel.queue(encode(Part(0)))
                    channel.send(encode(Part(lie == "unannounced")), torch.zeros(len(part) + (lie == "long")))
                channel.receive()
            made.lines[1].close()
        assert [receipt.status for receipt in made.push(0, 4)].count(Status.APPLIED) == 4


def test_nobody_takes_the_place_of_a_worker_that_is_connected(hosts: ShardHosts, tmp_path: Path) -> None:
    """As at the server itself; the same process may connect again, and another one when the first is gone."""
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        made.push(0, 2)
        other = Endpoint(hosts.addresses[0], TOKEN, joins=False, instance="another")
        with pytest.raises(ExchangeError):
            Connection(other, 0)
        assert len(made.push(2, 2)) == 2
        made.lines[0].close()
        broken = Connection(other, 0)  # without a word to the host
        successor = Connection(other, 0)
        successor.send(encode(Part(0)))
        successor.send(encode(Part(0)), made.memory.slot(0)[:1])
        successor.close(), broken.close()


def test_strangers_second_servers_and_other_programs_are_refused(hosts: ShardHosts, tmp_path: Path) -> None:
    spec = hybrid(server_options(hosts.addresses, worker_timeout=0.5))
    parameters = torch.zeros(LAYOUT.size)
    with pytest.raises(RefusedError, match="wrong token"):
        connect_hosts(HostConnector("another token than theirs", "", None, print), spec, LAYOUT, parameters)
    with pytest.raises(RefusedError, match="os: not a server that has shards on other machines"):
        connect_hosts(HostConnector(TOKEN, "os", None, print), spec, LAYOUT, parameters)
    with ServedByHosts(gradient_main.build, spec, tmp_path) as made:
        with pytest.raises(RefusedError, match="this shard belongs to another server, which is there"):
            connect_hosts(HostConnector(TOKEN, PROGRAMS[gradient_main.build], None, print), spec, LAYOUT, parameters)
        assert len(made.push(0, 2)) == 2


def test_how_long_a_host_waits_for_its_server_and_its_workers_and_what_it_takes_of_them() -> None:
    """Until a server has said how long, for a minute."""
    spec = hybrid(server_options(["a:1"], worker_timeout=7.0))
    host = ShardHost(TOKEN, lambda program: gradient_main.build)
    peers: dict[int | None, Any] = {worker: Peer(MagicMock(unsent=8)) for worker in (None, 0)}
    for worker, peer in peers.items():
        peer.channel.is_closed.return_value = False
        host.greet(peer)
        own = proof(TOKEN, "worker", peer.challenge, ours := challenge())
        host.receive(peer, encode(Introduce(own, ours, worker, False, "one")))
        if worker is None:
            peer.channel.notice_death.assert_called_once_with(60.0)
            peer.channel.room = torch.zeros(host_parts(spec, LAYOUT)[0].size).view(torch.uint8)
            host.begin("", spec.to_json(), LAYOUT.to_json(), 1)
        peer.channel.notice_death.assert_called_with(7.0)
        peer.channel.drop.assert_not_called()
        peer.channel.unsent = 9
        host._answer(peer, b"")
    server, worker = peers.values()
    assert (server.channel.largest, worker.channel.largest) == (1 << 24, 1 << 12)
    assert not server.channel.drop.called and worker.channel.drop.called, "it sends, and reads no answers"
    for number, refused in ((spec.workers + 15, False), (spec.workers + 16, True)):
        with pytest.raises(RefusedError, match="have numbers from 0 to") if refused else nullcontext():
            stranger: Any = Peer(MagicMock(unsent=0))
            host.greet(stranger)
            own = proof(TOKEN, "worker", stranger.challenge, ours := challenge())
            host._checked(stranger, encode(Introduce(own, ours, number, False, "one")))


def test_a_host_opens_no_file_that_a_server_names(hosts: ShardHosts, tmp_path: Path) -> None:
    """As the server's own processes do, for states of shards."""
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        made.remote[0].call(ShardPart.save, str(tmp_path / "state"))
        with pytest.raises(HalfAppliedError, match="ProtocolError: a shard has no method 'save'"):
            made.remote[0].value()
    assert not (tmp_path / "state").exists()


def test_a_server_that_is_gone_leaves_a_shard_for_the_next(hosts: ShardHosts, tmp_path: Path) -> None:
    spec = hybrid(server_options(hosts.addresses))
    for _ in range(2):
        with ServedByHosts(gradient_main.build, spec, tmp_path) as made:
            made.push(0, 2)
            for shard in made.remote:
                shard.close()
            with pytest.raises(ExchangeError):
                made.place(0, 1)


@pytest.mark.parametrize(
    ("worker", "joins", "said"),
    [
        (-1, False, "worker -1: the workers"),
        (1000, False, "from 0 to 17"),
        (None, True, "join at the address of the se"),
    ],
)
def test_a_host_takes_no_worker_that_the_server_would_not_take(
    worker: int | None, joins: bool, said: str, hosts: ShardHosts, tmp_path: Path
) -> None:
    with ServedByHosts(gradient_main.build, hybrid(server_options(hosts.addresses)), tmp_path) as made:
        with pytest.raises(RefusedError, match=said):
            Connection(Endpoint(hosts.addresses[0], TOKEN, joins, instance="another"), worker)
        assert len(made.push(0, 2)) == 2


def test_a_server_waits_until_its_host_finds_that_the_one_before_is_gone(hosts: ShardHosts, tmp_path: Path) -> None:
    """The machine of that one has failed, so the host still has its connection."""
    spec = hybrid(server_options(hosts.addresses))
    with ServedByHosts(gradient_main.build, spec, tmp_path) as first:
        found = Timer(1.0, lambda: [shard.close() for shard in first.remote])
        found.start()
        with ServedByHosts(gradient_main.build, spec, tmp_path) as second:
            assert len(second.push(0, 2)) == 2
        found.join()
