"""Server and workers die at any line; what was acknowledged counts once, and what all hold is the same."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_async.reporting.audit import audit
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.server_process import TOKEN, ServerProcess
from scripts.faults.adder import LAYOUT, Adder
from scripts.faults.digest import digest, read_snapshot
from scripts.faults.sgd_server import build
from tests.helpers.commands import ROOT
from tests.helpers.in_process import server as parameter_server
from tests.helpers.mortal import MortalServer
from tests.helpers.waiting import wait_until

ROUNDS = 6
HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])


def snapshots(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("snapshots/version-*.pt"))


@HOSTS
@pytest.mark.parametrize(("updates_per_step", "barrier"), [(1, 0), (2, 0), (2, 2)])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(deaths=st.lists(st.integers(0, 1500), min_size=1, max_size=3))
def test_a_server_that_dies_at_any_line_loses_nothing_that_its_rollbacks_do_not_name(
    tmp_path_factory: pytest.TempPathFactory, host: str, updates_per_step: int, barrier: int, deaths: list[int]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    server = MortalServer(2, run_dir, host, build, deaths)
    try:
        method = {
            "updates_per_step": updates_per_step,
            "barrier": barrier,
            "snapshot_seconds": 1e-3,
            "worker_timeout": 0.5,
        }
        clients = [Client(LastingConnection(server.address, server.token, worker, 30.0)) for worker in (0, 1)]
        server.begin_to_die()
        adders = [Adder(client, **method) for client in clients]
        if barrier:
            in_threads([adder.steps for adder in adders], ROUNDS)
        else:
            for _ in range(ROUNDS):
                for adder in adders:
                    adder.step()
        adders[0].client.schedule_event("begin_epoch", 1)
        for adder in adders:
            adder.version = adder.client.pull(adder.parameters.copy_)
        check(run_dir, server, adders, 0 if barrier else updates_per_step)
    finally:
        server.stop()


def in_threads(works: list[Callable[[int], None]], rounds: int) -> None:
    threads = [threading.Thread(target=work, args=(rounds,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def check(run_dir: Path, server: MortalServer, adders: list[Adder], updates_per_step: int) -> None:
    """Log, server, snapshot and workers agree, and nothing was acknowledged that is in neither log.

    Args:
        updates_per_step: 0 where that depends on who was there.
    """
    found = audit(run_dir)
    assert found.version == parameter_server(server.service).version
    assert not updates_per_step or found.applied // updates_per_step == found.version, (
        "every step has its updates in the log"
    )
    held = parameter_server(server.service).parameters
    assert held.tolist() == [float(found.version)] * LAYOUT.size, "the parameters count what the log counts"
    for adder in adders:
        assert (adder.version, digest(adder.parameters)) == (found.version, digest(held))
    wait_until(lambda: snapshots(run_dir)[-1].stem.endswith(f"{found.version:012d}"))
    state = read_snapshot(snapshots(run_dir)[-1])
    assert digest(state["server"]["parameters"]) == digest(held)


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "TCP"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        "scripts.faults.sgd_server", 3, tmp_path, tmp_path / "server.log", host=request.param, restarts=9
    )
    yield process
    process.stop()


def test_a_worker_killed_in_the_middle_of_a_push_changes_nothing_and_its_successor_goes_on(
    process: ServerProcess, tmp_path: Path
) -> None:
    first = Adder(Client(LastingConnection(process.address, process.token, 0, 30.0)))
    line = [sys.executable, "-m", "tests.helpers.adding_worker", "dying", process.address, "1"]
    environment = os.environ | {TOKEN: process.token, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"in the middle\n"
        worker.send_signal(signal.SIGKILL)
    assert first.step().version == 2 and first.parameters.tolist() == [2.0] * LAYOUT.size
    second = Adder(Client(LastingConnection(process.address, process.token, 1, 30.0)))
    assert second.sequence == 1 and second.step().version == 3
    assert audit(tmp_path).applied == 3


def test_a_server_killed_again_and_again_under_load_keeps_its_books(process: ServerProcess, tmp_path: Path) -> None:
    adders = [
        Adder(Client(LastingConnection(process.address, process.token, worker, 60.0)), snapshot_seconds=0.05)
        for worker in (0, 1, 2)
    ]
    stop = threading.Event()

    def work(adder: Adder) -> None:
        while not stop.is_set():
            adder.step()

    threads = [threading.Thread(target=work, args=(adder,), daemon=True) for adder in adders]
    for thread in threads:
        thread.start()
    for seconds in (0.31, 0.02, 0.17):  # after the new server has begun to take updates
        here = sum(adder.sequence for adder in adders)
        wait_until(lambda here=here: sum(adder.sequence for adder in adders) > here + 30, 60)  # type: ignore[misc]
        time.sleep(seconds)
        pid = process.process.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: process.process.pid != pid)  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    adders[0].step()
    adders[0].client.save_state(str(tmp_path / "state.pt"))
    state = read_snapshot(tmp_path / "state.pt")["server"]
    found = audit(tmp_path)
    assert len(found.rollbacks) == 3
    assert found.applied == found.version == state["version"] == adders[0].version
    assert state["parameters"].tolist() == [float(found.version)] * LAYOUT.size
    assert digest(state["parameters"]) == digest(adders[0].parameters)
