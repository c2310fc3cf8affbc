"""Hosts of shards that are not there, are gone or hang, and options that do not go with them."""

import json
import signal
import socket
from pathlib import Path
from threading import Thread, Timer
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from fairseq_async.algorithms import Update
from fairseq_async.errors import ConfigurationError, ExchangeError, HalfAppliedError, RefusedError
from fairseq_async.method.methods import outer_rule
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol.client_connection import Endpoint
from fairseq_async.protocol.division import local_part
from fairseq_async.protocol.shard_messages import TAKEN
from fairseq_async.server.programs import gradient_main
from fairseq_async.server.run import as_many
from fairseq_async.server.shards import remote
from fairseq_async.server.shards.calls import OtherShard
from fairseq_async.server.shards.remote import HostConnector, RemoteShard, connect_hosts
from fairseq_async.worker.connection.shard_lines import ShardLines
from tests.helpers.sharded import (
    LAYOUT,
    TOKEN,
    ServedByHosts,
    hybrid,
    server_options,
    shard_hosts,
)
from tests.helpers.stand_ins import Time


def test_a_host_that_was_killed_ends_the_server(tmp_path: Path) -> None:
    with shard_hosts(tmp_path, 1) as own:
        with ServedByHosts(gradient_main.build, hybrid(server_options(own.addresses)), tmp_path) as made:
            made.push(0, 2)
            made.server.check_parts()
            own.kill(0)
            with pytest.raises(HalfAppliedError, match="shard 1 of the server, at .* is gone"):
                made.server.check_parts()
            with pytest.raises(HalfAppliedError, match="shard 1 of the server"):
                made.server.push(Update(0, 1, 0, 1.0, made.memory.slot(0)[made.here]))


def test_a_host_that_hangs_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "_SILENT_SECONDS", 0.2)
    with shard_hosts(tmp_path, 1) as own:
        with ServedByHosts(gradient_main.build, hybrid(server_options(own.addresses)), tmp_path) as made:
            made.push(0, 2)
            own.running[0].send_signal(signal.SIGSTOP)
            goes_on = Timer(1.0, lambda: own.running[0].send_signal(signal.SIGCONT))
            goes_on.start()
            made.server.checksum()
            goes_on.join()
    said = f"the run waits: shard 1 of the server, at {own.addresses[0]}, has not answered for 0 s"
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("in_time", [False, True])
def test_an_answer_that_is_missing_for_a_minute_is_told(monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    """A host may write a large state meanwhile."""
    channel, said = MagicMock(), list[str]()
    channel.is_readable.return_value = in_time
    monkeypatch.setattr(OtherShard, "answer", lambda shard: "its answer")
    assert RemoteShard("shard 1", MagicMock(), channel, said.append).answer() == "its answer"
    channel.is_readable.assert_called_once_with(60.0)
    assert said == ([] if in_time else ["the run waits: shard 1 has not answered for 60 s"])


def test_a_host_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ARRIVAL_SECONDS", 0.3)
    monkeypatch.setattr(remote, "_QUIET_SECONDS", 0.0)
    address = f"127.0.0.1:{free_port()}"
    said: list[str] = []
    spec = hybrid(server_options([address]))
    with pytest.raises(RefusedError, match=rf"no shard at {address} \(.*\); start it there with"):
        connect_hosts(HostConnector(TOKEN, "", None, said.append), spec, LAYOUT, torch.zeros(LAYOUT.size))
    lacks = f"no shard at {address} (Connection refused); start it there with: fairseq-async shard {address}"
    assert said == [f"the run waits: {lacks}"]


def test_hosts_that_are_reached_are_let_go_where_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next server would else be refused by them."""
    reached = MagicMock()

    def connect(connector: HostConnector, address: str, seconds: float) -> Any:
        if address == "a:1":
            return reached
        raise RefusedError("it does not come")

    monkeypatch.setattr(HostConnector, "connect", connect)
    monkeypatch.setattr(RemoteShard, "begin", lambda *given: None)
    spec = hybrid(server_options(["a:1", "b:1"]))
    with pytest.raises(RefusedError, match="it does not come"):
        connect_hosts(HostConnector(TOKEN, "", None, print), spec, LAYOUT, torch.zeros(LAYOUT.size))
    reached.close.assert_called_once_with()


def test_a_worker_names_the_host_that_it_misses_until_it_tries_again() -> None:
    """The next attempt begins with the server, which may be what is gone then."""
    address = f"127.0.0.1:{free_port()}"
    lines = ShardLines(Endpoint("", TOKEN, joins=False, instance="test"), 0, hybrid(server_options([address])), LAYOUT)
    with pytest.raises(ExchangeError):
        lines.connect()
    assert lines.missing == address
    lines.close()
    assert lines.missing == ""


def test_a_host_that_has_encrypted_connections_is_not_said_to_be_missing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ARRIVAL_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        Thread(target=lambda: listener.accept()[0].close()).start()  # as a TLS host does, after its ten seconds
        with pytest.raises(RefusedError, match="does it need --tls?"):
            connect_hosts(
                HostConnector(TOKEN, "", None, print), hybrid(server_options([address])), LAYOUT, torch.zeros(9)
            )


def test_what_says_nothing_holds_a_server_up_no_longer_than_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's port, or the server's own: it must still end when nobody waits for it."""
    monkeypatch.setattr(remote, "_GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        reach = HostConnector(TOKEN, "", None, print, abandoned=lambda: True)
        with pytest.raises(RefusedError, match=rf"no shard at {address} \(.*says nothing.*\); start it there with"):
            connect_hosts(reach, hybrid(server_options([address])), LAYOUT, torch.zeros(LAYOUT.size))


@pytest.mark.parametrize(
    ("error", "patience", "told"),
    [
        (ExchangeError("nothing"), 600.0, 1),  # someone may have to start the host again
        (RefusedError(TAKEN), 14.0, 1),  # twice the time in which it finds that the server before is gone
        (RefusedError("of another run"), 0.0, 0),
    ],
    ids=["not there", "taken", "refused"],
)
@pytest.mark.parametrize("abandoned", [False, True])
def test_a_host_is_tried_again_for_as_long_as_it_may_come_unless_nobody_waits_for_the_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception, patience: float, told: int, abandoned: bool
) -> None:
    time, said = Time(), list[float]()

    def fail(endpoint: Endpoint, worker: int | None) -> None:
        raise error

    monkeypatch.setattr(remote, "time", time)
    monkeypatch.setattr(remote, "Connection", fail)
    reach = HostConnector(TOKEN, "", None, lambda line: said.append(time.now), lambda: abandoned)
    with pytest.raises(RefusedError):
        reach.connect("10.0.0.1:1", 7.0)
    assert time.now == 1000.0 + (0.0 if abandoned else patience + 0.5) and set(time.pauses) <= {0.5}
    assert said == ([] if abandoned else [1005.5] * told), "after five seconds, once"


def test_a_host_that_answers_is_given_up_after_as_long_a_silence_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock()
    monkeypatch.setattr(remote, "Connection", made)
    HostConnector(TOKEN, "", None, print).connect("10.0.0.1:1", 7.0)
    (endpoint, worker), _ = made.call_args
    assert endpoint.patience == 5.0 and worker is None
    made.return_value.give_up_after.assert_called_once_with(7.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"outer": "sgd", "compress": {"push": "int8"}}, "compress"),
        ({"outer": "sgd", "fragments": 2}, "fragments"),
        ({"outer": "sgd", "staleness_power": -0.5}, "staleness-power"),
        ({"outer": "sgd", "delay_compensation": 0.5}, "delay-compensation"),
        ({"outer": "sgd", "upstream": "10.0.0.1:1,region=0"}, "upstream"),
    ],
)
def test_what_needs_the_whole_model_in_one_process_is_refused(options: dict[str, Any], named: str) -> None:
    chosen = outer_rule("sgd").options(**options)
    assert isinstance(chosen, LocalSGDOptions)
    with pytest.raises(ConfigurationError, match=f"--{named} does not go with --server-shards on other machines"):
        local_sgd_spec(chosen, 2, [], server_options(["10.0.0.2:1"]), {})


@pytest.mark.parametrize("given", ["here", "a:1,a:1", "a:1,,b:1", "a:0x1"])
def test_addresses_are_checked(given: str) -> None:
    with pytest.raises(ValueError):
        ServerOptions(server_shards=given)


def test_more_shards_than_tensors_are_refused() -> None:
    spec = hybrid(server_options([f"a:{port}" for port in range(1, 7)]))
    with pytest.raises(RefusedError, match="--server-shards makes 7 shards: the model has 6 tensors"):
        local_part(spec, LAYOUT)


@pytest.mark.parametrize(
    ("before", "remedy"),
    [(4, "--server-shards 2,HOST:PORT,HOST:PORT"), (2, "--server-shards 1,HOST:PORT"), (1, "--server-shards 1")],
)
def test_a_state_of_another_number_of_shards_names_what_gives_as_many(before: int, remedy: str) -> None:
    assert as_many(before, hosts=2) == remedy


def test_an_older_description_has_no_hosts() -> None:
    described = json.loads(json.dumps(hybrid(ServerOptions()).to_json()))
    del described["server"]["shard_hosts"]
    assert MethodSpec.from_json(described).server.hosts == []
