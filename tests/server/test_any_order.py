"""The server against a model of ten lines: pushes, repetitions, broken connections, silence and deaths in any order."""

import copy
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Hello, Initialise, Push, Welcome, encode
from fairseq_async.reporting.audit import audit
from scripts.faults.adder import LAYOUT, adder_spec
from scripts.faults.sgd_server import build
from tests.helpers.in_process import Connection, end, new_service, slot, take_snapshot
from tests.helpers.in_process import server as parameter_server

NO_CHANGE: Mapping[str, Any] = {}
WORKERS = st.integers(0, 2)
VALUES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0, math.nan, math.inf])
UPDATES = st.tuples(VALUES, st.integers(1, 4), st.booleans())  # value, weight, whether the answer is heard


class Model:
    """What a server of plain SGD behind an accumulator holds. lr is 1, and all parameters are equal."""

    def __init__(self, updates_per_step: int) -> None:
        self.n, self.value, self.version, self.sum, self.weight, self.count = updates_per_step, 0.0, 0, 0.0, 0.0, 0
        self.last: dict[int, int] = {}

    def push(self, worker: int, sequence: int, value: float, weight: float) -> str:
        if sequence <= self.last.get(worker, -1):
            return "duplicate"
        self.last[worker] = sequence
        if not math.isfinite(value):
            return "refused"
        self.sum, self.weight, self.count = self.sum + weight * value, self.weight + weight, self.count + 1
        if self.count == self.n:
            self.value, self.version = self.value - self.sum / self.weight, self.version + 1
            self.sum, self.weight, self.count = 0.0, 0.0, 0
        return "applied"


class Server(RuleBasedStateMachine):
    """Three workers; each knows the number of its next update, and sends it again until it has heard an answer."""

    @initialize(updates_per_step=st.integers(1, 3))
    def begin(self, updates_per_step: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.run_dir, self.now = Path(self.directory.name), 1000.0
        self.spec = adder_spec(updates_per_step=updates_per_step, worker_timeout=5.0)
        self.service = new_service(3, self.run_dir, build, lambda: self.now)
        self.connections: dict[int, Connection] = {}
        self.next = {0: 0, 1: 0, 2: 0}
        self.model = Model(updates_per_step)
        connection = self.enter(0)
        slot(self.service, 0).zero_()
        connection.ask(Initialise(False), Welcome)
        self.service.tick()  # takes the first snapshot
        self.saved = copy.deepcopy(self.model)

    def enter(self, worker: int) -> Connection:
        connection = self.connections[worker] = Connection(self.service)
        connection.introduce(worker, f"process {worker}")
        self.welcome = connection.ask(Hello(self.spec, LAYOUT, remote=False), Welcome)
        return connection

    def connection(self, worker: int) -> Connection:
        if worker not in self.connections:
            connection = self.enter(worker)
            assert self.welcome.sequence == self.model.last.get(worker, -1) + 1
            return connection
        return self.connections[worker]

    def send(
        self, worker: int, sequence: int, value: float, weight: float, change: Mapping[str, Any] = NO_CHANGE
    ) -> dict[str, Any]:
        connection = self.connection(worker)
        slot(self.service, worker).fill_(value)
        push = json.loads(encode(Push(sequence, 0, weight)))
        assert connection.send(push | change)
        return connection.last

    @rule(worker=WORKERS, updates=st.lists(UPDATES, min_size=1, max_size=5))
    def push(self, worker: int, updates: list[tuple[float, int, bool]]) -> None:
        """If an answer is not heard, the worker sends the same number again, sooner or later."""
        for value, weight, heard in updates:
            answer = self.send(worker, self.next[worker], value, float(weight))
            expected = self.model.push(worker, self.next[worker], value, float(weight))
            assert answer["status"] == expected
            self.next[worker] += heard

    @rule(worker=WORKERS, back=st.integers(1, 5), value=VALUES)
    def an_old_number(self, worker: int, back: int, value: float) -> None:
        sequence = self.model.last.get(worker, -1) + 1 - back
        answer = self.send(worker, sequence, value, 1.0)
        assert "error" in answer if sequence < 0 else answer["status"] == "duplicate"

    @rule(
        worker=WORKERS,
        change=st.sampled_from(
            [{"base_version": 10**6}, {"base_version": -1}, {"weight": math.nan}, {"weight": -1.0}, {"report": None}]
            + [{"sequence": 10**30}, {"sequence": None}, {"kind": "pusch"}, {"kind": None}, {"report": {"epochs": "x"}}]
        ),
    )
    def nonsense(self, worker: int, change: dict[str, Any]) -> None:
        assert "error" in self.send(worker, self.next[worker], 1.0, 1.0, change)

    @rule(worker=WORKERS)
    def the_connection_breaks(self, worker: int) -> None:
        if worker in self.connections:
            self.connections.pop(worker).close()

    @rule(worker=WORKERS)
    def comes_again_before_the_server_has_seen_the_break(self, worker: int) -> None:
        self.enter(worker)

    @rule(seconds=st.sampled_from([0.1, 4.0, 6.0, 100.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.service.tick()

    @rule()
    def a_snapshot(self) -> None:
        take_snapshot(self.service)
        self.saved = copy.deepcopy(self.model)

    @rule()
    def the_server_dies(self) -> None:
        end(self.service)
        self.service = new_service(3, self.run_dir, build, lambda: self.now)
        assert self.service.recover() is not None
        self.service.tick()  # each life begins with a snapshot
        self.connections.clear()
        self.model = copy.deepcopy(self.saved)

    @rule(worker=WORKERS)
    def a_worker_dies(self, worker: int) -> None:
        """Its successor learns from the server which number is the next."""
        self.the_connection_breaks(worker)
        self.enter(worker)
        self.next[worker] = self.welcome.sequence

    @rule(noise=st.dictionaries(st.sampled_from(["kind", "proof", "worker", "challenge"]), st.text(max_size=4)))
    def a_stranger(self, noise: dict[str, Any]) -> None:
        stranger = Connection(self.service)
        assert stranger.send(noise)
        assert "error" in stranger.last and stranger.channel.closed

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "model"):
            return
        server = parameter_server(self.service)
        assert (server.version, server.sequences) == (self.model.version, self.model.last)
        assert server.parameters.tolist() == pytest.approx([self.model.value] * LAYOUT.size, abs=1e-4)
        assert self.service.described.slots.memory.published.equal(server.parameters)

    @precondition(lambda self: hasattr(self, "model"))
    @rule()
    def the_books_are_right(self) -> None:
        try:
            found = audit(self.run_dir)
        except ConfigurationError:
            return
        assert found.version == self.model.version or found.applied == 0

    def teardown(self) -> None:
        if hasattr(self, "service"):
            end(self.service)
            self.directory.cleanup()


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
