"""A message that is lost, late, spoilt or there twice leaves the server as if nothing had happened, to the bit."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import Rule, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.protocol.receipt import Status
from fairseq_async.reporting.audit import audit
from fairseq_async.server.plan import Plan
from fairseq_async.worker.connection.client import Client
from scripts.faults import schedule
from scripts.faults.digest import digest
from scripts.faults.injector import Injector
from scripts.faults.proxy import Proxy
from scripts.faults.schedule import Fault, Schedule
from scripts.faults.thread_server import ThreadServer
from tests.helpers.faulty_runs import HYBRID, HYBRID_COMPRESSED, LAYOUT, LOCAL, LOCAL_COMPRESSED, Worker, build, train

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
        workers = [Worker(Client(proxy.address, server.token, worker, 30.0), spec) for worker in (0, 1)]
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
