"""A message that is lost, late, spoilt or there twice leaves the server as if nothing had happened, to the bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_async.reporting.audit import audit
from fairseq_async.server import ServerClient
from fairseq_async.server.parameter_server import Status
from tests.chaos import schedule
from tests.chaos.injector import Injector
from tests.chaos.proxy import Proxy
from tests.chaos.runs import HYBRID, LOCAL, Worker, build, digest, train
from tests.chaos.schedule import Fault, Schedule
from tests.servers import ThreadServer

ROUNDS = 12
METHODS = pytest.mark.parametrize("method", [HYBRID, LOCAL], ids=["hybrid", "local SGD"])
HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
QUIET = Schedule(faults=())


def run(run_dir: Path, host: str, method: dict[str, Any], faults: Schedule) -> tuple[str, Counter[str]]:
    """The digest of the server's whole state at the end, and the faults that struck."""
    server = ThreadServer(2, run_dir, host, build)
    proxy = Proxy(server.address, host)
    try:
        Injector(faults, proxy)
        workers = [Worker(ServerClient(proxy.address, server.token, worker, 30.0), method) for worker in (0, 1)]
        train(workers, ROUNDS)
        pulled = [digest(worker.parameters) for worker in workers[1:]]  # worker 0 has pulled before the last update
        state = server.service.run.state_dict()
        assert pulled == [digest(server.service.server.parameters)]
        for worker in workers:
            worker.client.leave(finished=False)
    finally:
        proxy.close()
        server.stop()
    return digest(state), proxy.struck


@METHODS
@HOSTS
def test_the_state_is_that_of_the_run_without_faults(tmp_path: Path, host: str, method: dict[str, Any]) -> None:
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
    message=st.integers(1, 2 * ROUNDS),
) | st.builds(
    Fault,
    kind=st.sampled_from(["drop", "duplicate"]),
    target=st.integers(0, 1),
    message=st.integers(1, 2 * ROUNDS),
).map(lambda fault: fault if fault.kind == "duplicate" else fault.model_copy(update={"of": "reply"}))


@METHODS
@HOSTS
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(given=st.lists(faults, max_size=20).map(Schedule.of))
def test_so_it_is_with_any_schedule(tmp_path: Path, host: str, method: dict[str, Any], given: Schedule) -> None:
    expected, _ = run(tmp_path / "quiet", host, method, QUIET)
    found, _ = run(tmp_path / "faults", host, method, given)
    assert found == expected
