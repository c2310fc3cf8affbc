"""A message that is lost, late, spoilt or there twice leaves the server as if nothing had happened, to the bit."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_async.method_spec import MethodSpec
from fairseq_async.reporting.audit import audit
from fairseq_async.server.parameter_server import Status
from fairseq_async.worker.client import Client
from scripts.faults import schedule
from scripts.faults.digest import digest
from scripts.faults.injector import Injector
from scripts.faults.proxy import Proxy
from scripts.faults.schedule import Fault, Schedule
from scripts.faults.thread_server import ThreadServer
from tests.helpers.faulty_runs import HYBRID, LOCAL, Worker, build, train

ROUNDS = 12
METHODS = pytest.mark.parametrize("method", [HYBRID, LOCAL], ids=["hybrid", "local SGD"])
HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
QUIET = Schedule(faults=())


def run(run_dir: Path, host: str, spec: MethodSpec, faults: Schedule) -> tuple[str, Counter[str]]:
    """The digest of the server's whole state at the end, and the faults that struck."""
    server = ThreadServer(2, run_dir, host, build)
    proxy = Proxy(server.address, host)
    try:
        Injector(faults, proxy)
        workers = [Worker(Client(proxy.address, server.token, worker, 30.0), spec) for worker in (0, 1)]
        train(workers, ROUNDS)
        pulled = [digest(worker.parameters) for worker in workers[1:]]  # worker 0 has pulled before the last update
        state = server.service.described.state_dict()
        assert pulled == [digest(server.service.described.coordinator.server.parameters)]
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


@METHODS
@HOSTS
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(given=schedules.map(Schedule.of))
def test_so_it_is_with_any_schedule(tmp_path: Path, host: str, method: MethodSpec, given: Schedule) -> None:
    expected, _ = run(tmp_path / "quiet", host, method, QUIET)
    found, struck = run(tmp_path / "faults", host, method, given)
    assert struck == Counter(fault.kind for fault in given.faults), "each fault has happened"
    assert found == expected
