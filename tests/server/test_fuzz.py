"""A server that anybody may talk to stays up, remembers nothing of it, and changes nothing."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_async.protocol import Hello, Initialise, Push, Welcome, encode
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts import fuzz_sessions
from scripts.faults.adder import LAYOUT, Adder, adder_spec
from scripts.faults.direct import Member
from scripts.faults.fuzzer import Fuzzer, read_corpus
from scripts.faults.sgd_server import build
from scripts.faults.thread_server import ThreadServer
from tests.helpers.in_process import Connection, end, new_service
from tests.helpers.in_process import server as parameter_server


@pytest.mark.parametrize("seed", [0, 1])
def test_malformed_messages_do_not_change_the_server(tmp_path: Path, seed: int) -> None:
    with ThreadServer(2, tmp_path, "127.0.0.2") as server:
        adder = Adder(Client(LastingConnection(server.address, server.token, 0, 30.0)))
        adder.step()
        fuzzer = Fuzzer(server, random.Random(seed), corpus=read_corpus())
        before = fuzzer.state()
        fuzzer.run(2.0)
        assert fuzzer.state() == before
        assert sum(fuzzer.tried.values()) > 100 and len(fuzzer.found) > 5
        assert adder.step().version == 2


def test_what_was_once_found_is_refused_again(tmp_path: Path) -> None:
    with ThreadServer(2, tmp_path, "127.0.0.2") as server:
        adder = Adder(Client(LastingConnection(server.address, server.token, 0, 30.0)))
        fuzzer = Fuzzer(server, random.Random(0))
        before = fuzzer.state()
        for data in read_corpus():
            with fuzzer._connect() as connection:
                fuzzer._send(connection, "stranger", data)
        assert fuzzer.state() == before and adder.step().version == 1


@pytest.mark.parametrize("compress", ["none", "topk:chunk=8,keep=2,pull=int8", "int8,pull=e3m0"])
def test_a_hostile_worker_changes_nothing_of_an_honest_ones_run(tmp_path: Path, compress: str) -> None:
    """Its sessions follow the protocol's schema but for one thing a message; its own updates are zeros or NaN."""
    honest, state, attack, _ = fuzz_sessions.go(tmp_path / "both", 1500, seed=0, compress=compress)
    assert attack.sent >= 1500 and len(attack.outcomes) > 50
    assert state == fuzz_sessions.alone(tmp_path / "alone", len(honest.seconds), compress)


def test_an_update_without_its_tensor_is_refused(tmp_path: Path) -> None:
    """What was in the slot before is no gradient."""
    service = new_service(2, tmp_path, build, lambda: 1000.0)
    attack = Member(service, 0, adder_spec(), LAYOUT, remote=True)
    attack.send(encode(Initialise(False)), bytes(4 * LAYOUT.size))
    assert b"an update without its tensor" in attack.send(encode(Push(0, 0, 1.0)))
    assert b'"status":"applied"' in attack.send(encode(Push(0, 0, 1.0)), bytes(4 * LAYOUT.size))
    end(service)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# no report, or it could be an update; a path, or the end of the run, could be meant
KEYS = ["worker", "joins", "instance", "challenge", "proof", "layout", "spec", "remote", "state", "sequence"]
KEYS += ["base_version", "weight", "wait", "norm", "number", "event", "epoch", "loss"]
KINDS = ["introduce", "hello", "initialise", "push", "pull", "wait", "schedule_event", "alive", "none of these"]


@pytest.mark.parametrize("stage", ["stranger", "introduced", "admitted", "first of all"])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8)), max_size=4
    )
)
def test_any_json_is_answered_and_changes_nothing(stage: str, messages: list[tuple[str, dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        service = new_service(2, Path(directory), build, lambda: 1000.0)
        try:
            hello = Hello(adder_spec(), LAYOUT, remote=False)
            if stage != "first of all":
                first = Connection(service)
                first.introduce(0)
                first.ask(hello, Welcome)
                first.ask(Initialise(False), Welcome)
            other = Connection(service)
            if stage != "stranger":
                other.introduce(1 if stage != "first of all" else 0)
            if stage == "admitted":
                other.ask(hello, Welcome)
            for kind, message in messages:
                other.send({"kind": kind} | message)
                service.tick()
            if stage != "first of all":
                server = parameter_server(service)
                assert server.version == 0 and not server.sequences
                assert not server.parameters.any()
        finally:
            end(service)
