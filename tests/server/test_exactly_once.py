"""A message that is lost, late, spoilt or there twice leaves the server as if nothing had happened, to the bit."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Rule, Update
from fairseq_async.method.spec import MethodSpec, ServerSettings, local_sgd_spec
from fairseq_async.options.compression import parse
from fairseq_async.options.config import DelayedNesterovOptions
from fairseq_async.protocol import Layout, Push, PushReply, Report
from fairseq_async.protocol.receipt import Status
from fairseq_async.reporting.audit import audit
from fairseq_async.server.plan import EpochPlan, Plan
from fairseq_async.server.programs import local_sgd_main as outer
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults import schedule
from scripts.faults.adder import LAYOUT, adder_spec
from scripts.faults.digest import digest
from scripts.faults.injector import Injector
from scripts.faults.proxy import Proxy
from scripts.faults.schedule import Fault, Schedule
from scripts.faults.sgd_server import Constant, updates_per_step
from scripts.faults.thread_server import ThreadServer

HYBRID = adder_spec(updates_per_step=3)


_OPTIONS = DelayedNesterovOptions(local_steps=5, dynamic_local_steps=True, delay=2, c=0.0, total_steps=0, seed=1)


LOCAL = replace(local_sgd_spec(_OPTIONS, 2, [], None, {}), server=ServerSettings(snapshot_seconds=1e6), publishes=True)


_CODECS = parse("topk:chunk=8,keep=2,pull=int8:block=16")


HYBRID_COMPRESSED = replace(HYBRID, options=HYBRID.options | {"compress": _CODECS.model_dump()})


LOCAL_COMPRESSED = replace(LOCAL, options=LOCAL.options | {"compress": _CODECS.model_dump()})


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
    """Adam behind an accumulator, or delayed Nesterov."""
    if spec.method == "local_sgd":
        return outer.build(spec, layout, parameters)
    rule = HybridAccumulation(torch.optim.Adam([parameters], lr=0.1), updates_per_step(spec), clip_norm=2.0)
    return rule, EpochPlan(Constant(), 0)


class Worker:
    """Pushes noise that is its own and its update's, always the same.

    Attributes:
        total: the sum of its updates, in float64.
    """

    def __init__(self, client: Client, spec: MethodSpec) -> None:
        self.client, self.local = client, spec.method == "local_sgd"
        self.parameters = torch.empty(LAYOUT.size)
        self.sequence = self.version = 0
        self.total = torch.zeros(LAYOUT.size, dtype=torch.float64)
        if not client.join(LAYOUT, spec).initialised:
            client.slot.copy_(torch.linspace(-1, 1, LAYOUT.size))
            client.initialise(None)
        self.pull()

    def pull(self) -> None:
        """What the next update depends on, as it is given to those that go on from it."""
        self.version = self.client.pull(self.parameters.copy_, starts=True)

    def push(self) -> PushReply:
        noise = torch.Generator().manual_seed(1000 * self.client.worker + self.sequence)
        delta = torch.randn(LAYOUT.size, generator=noise) + 0.1 * self.parameters
        seconds = 0.1 * (1 + self.client.worker)
        report = Report(local_steps=5, step_seconds=seconds, position={"seen": self.sequence})
        weight = float(self.sequence % 3 + 1)
        push = Push(self.sequence, self.version, weight, report)
        answer = self.client.push(lambda slot: slot.copy_(delta), push)
        self.sequence += 1
        self.total += delta
        return answer

    def residual(self) -> Tensor:
        """What its updates had that was not sent; zeros where everything is."""
        compressor = self.client.compressor
        return (
            torch.zeros(LAYOUT.size)
            if compressor is None
            else compressor.state_dict()["parts"][0]["feedback"]["residual"]
        )


def train(workers: Sequence[Worker], rounds: int) -> None:
    """In turn: what a server does depends on the order."""
    for _ in range(rounds):
        for worker in workers:
            worker.push()
            worker.pull()


ROUNDS = 12
METHODS = pytest.mark.parametrize(
    "method",
    [HYBRID, LOCAL, HYBRID_COMPRESSED, LOCAL_COMPRESSED],
    ids=["hybrid", "local SGD", "hybrid, compressed", "local SGD, compressed"],
)
HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
QUIET = Schedule(faults=())


class Applied:
    """Builds rules that add up, in float64, what each worker's updates have brought to them."""

    def __init__(self) -> None:
        self.totals = {worker: torch.zeros(LAYOUT.size, dtype=torch.float64) for worker in (0, 1)}

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
        rule, plan = build(spec, layout, parameters)
        apply = rule.apply

        def add_up(parameters: Tensor, update: Update) -> bool:
            self.totals[update.worker] += update.delta
            return apply(parameters, update)

        rule.apply = add_up  # type: ignore[method-assign]
        return rule, plan


def run(run_dir: Path, host: str, spec: MethodSpec, faults: Schedule) -> tuple[str, Counter[str]]:
    """The digest of the server's whole state and of what is not sent at the end, and the faults that struck.

    What a worker's updates have brought to the rule, and what is left of them, are their sum.
    """
    applied = Applied()
    server = ThreadServer(2, run_dir, host, applied.build)
    proxy = Proxy(server.address, host)
    try:
        Injector(faults, proxy)
        workers = [
            Worker(Client(LastingConnection(proxy.address, server.token, worker, 30.0)), spec) for worker in (0, 1)
        ]
        train(workers, ROUNDS)
        workers[1].client.pull(workers[1].parameters.copy_)
        state = {"server": server.service.described.state_dict(), "residuals": [each.residual() for each in workers]}
        assert digest(workers[1].parameters) == digest(server.service.described.coordinator.server.parameters)
        for number, worker in enumerate(workers):
            torch.testing.assert_close(applied.totals[number] + worker.residual(), worker.total, rtol=0.0, atol=1e-12)
            assert worker.residual().any() == (spec.compress.push is not None)
        for worker in workers:
            worker.client.leave(finished=False)
    finally:
        proxy.close()
        server.stop()
    return digest(state), proxy.struck


@METHODS
@HOSTS
def test_the_state_is_that_of_the_run_without_faults(tmp_path: Path, host: str, method: MethodSpec) -> None:
    given = schedule.read(Path(__file__).parent / "schedules" / "messages.yaml")
    expected, _ = run(tmp_path / "quiet", host, method, QUIET)
    found, struck = run(tmp_path / "faults", host, method, given)
    assert struck == Counter(fault.kind for fault in given.faults), "each fault has happened"
    assert found == expected
    quiet, faults = audit(tmp_path / "quiet"), audit(tmp_path / "faults")
    assert faults.applied == quiet.applied == 2 * ROUNDS and faults.version == quiet.version
    assert sum(counts[Status.DUPLICATE] for counts in faults.counts.values()) > 0


faults = st.builds(
    Fault,
    kind=st.sampled_from(["drop", "corrupt"]),
    target=st.integers(0, 1),
    of=st.just("request"),
    message=st.integers(1, ROUNDS),  # a worker asks so often at least: each fault strikes
) | st.builds(
    Fault,
    kind=st.sampled_from(["drop", "duplicate"]),
    target=st.integers(0, 1),
    message=st.integers(1, ROUNDS),
).map(lambda fault: fault if fault.kind == "duplicate" else fault.model_copy(update={"of": "reply"}))
schedules = st.lists(faults, min_size=1, max_size=20, unique_by=lambda fault: (fault.target, fault.message))


@pytest.mark.parametrize("method", [HYBRID, LOCAL, HYBRID_COMPRESSED], ids=["hybrid", "local SGD", "compressed"])
@HOSTS
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(given=schedules.map(Schedule.of))
def test_any_schedule_of_faults_ends_as_a_quiet_run(
    tmp_path: Path, host: str, method: MethodSpec, given: Schedule
) -> None:
    expected, _ = run(tmp_path / "quiet", host, method, QUIET)
    found, struck = run(tmp_path / "faults", host, method, given)
    assert struck == Counter(fault.kind for fault in given.faults), "each fault has happened"
    assert found == expected
