"""What happens on the way between two machines: a cable that is pulled out for a while, one that is long and bad."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairseq_async.exchange.authentication import new_token
from fairseq_async.reporting.audit import audit
from fairseq_async.server.process import TOKEN
from tests.conftest import Processes, free_port
from tests.test_two_machines import Machines, ip, machines  # noqa: F401

_OUT = 5.0  # seconds, more than twice --worker-timeout
_SERVER = """
import os, socket, sys
host, port, run_dir = sys.argv[1:]
listener = socket.create_server((host, int(port)))
listener.set_inheritable(True)
print("listens", flush=True)
rim = ["--listener", str(listener.fileno()), "--workers", "1", "--run-dir", run_dir]
os.execv(sys.executable, [sys.executable, "-m", "tests.sgd_server", *rim])
"""


@contextmanager
def server(prefix: list[str], host: str, token: str, run_dir: Path) -> Iterator[str]:
    """A server on one machine; yields its address."""
    port = str(free_port())
    line = [*prefix, sys.executable, "-c", _SERVER, host, port, str(run_dir)]
    process = subprocess.Popen(line, env=os.environ | {TOKEN: token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"
        yield f"{host}:{port}"
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the lifeline
        process.wait(10)


def read_until(worker: "subprocess.Popen[str]", number: int) -> None:
    """Until it has taken so many steps."""
    assert worker.stdout is not None
    while (line := worker.stdout.readline()) and int(line) < number:
        pass
    assert line, f"the worker ended with {worker.wait()}"


def test_a_worker_goes_on_after_a_partition(machines: Machines, processes: Processes, tmp_path: Path) -> None:  # noqa: F811
    if not machines.prefixes[0]:
        pytest.skip("no network namespaces here")
    token = new_token()
    with server(machines.prefixes[0], machines.address, token, tmp_path) as address:
        line = [*machines.prefixes[1], sys.executable, "-m", "tests.chaos.steady_worker", address]
        worker = processes.start(line, **{TOKEN: token})
        read_until(worker, 5)
        name = machines.prefixes[0][3]
        ip("-n", name, "link", "set", "cable", "down")
        time.sleep(_OUT)
        before = audit(tmp_path).applied
        ip("-n", name, "link", "set", "cable", "up")
        read_until(worker, before + 20)
        assert worker.poll() is None
        found = audit(tmp_path)
        assert found.applied == found.version >= before + 20 and not found.rollbacks


def test_updates_cross_a_long_thin_cable_that_loses_packets(
    machines: Machines,  # noqa: F811
    processes: Processes,
    tmp_path: Path,
) -> None:
    """200 ms there and back, 1% of the packets lost, 10 Mbit/s; updates of 100 kB, and ``--worker-timeout`` is 2 s."""
    if not machines.prefixes[0] or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no network namespaces or no TUN devices here")
    names, addresses = [prefix[3] for prefix in machines.prefixes], ["10.213.78.1", "10.213.78.2"]
    ends = [word for end in zip(names, addresses, strict=True) for word in end]
    quality = ["--seconds", "0.1", "--loss", "0.01", "--bytes-per-second", "1.25e6"]
    line = [sys.executable, "-m", "tests.chaos.wire", *ends, *quality]
    wire = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert wire.stdout is not None and wire.stdout.readline() == "up\n"
        token = new_token()
        with server(machines.prefixes[0], addresses[0], token, tmp_path) as address:
            line = [*machines.prefixes[1], sys.executable, "-m", "tests.chaos.steady_worker", address, "25000"]
            worker = processes.start(line, **{TOKEN: token})
            read_until(worker, 8)
            found = audit(tmp_path)
            assert found.applied == found.version >= 8 and not found.rollbacks
        words = wire.communicate("", timeout=10)[0].split()  # packets 1234 lost 12 1234 lost 12
        assert min(int(words[1]), int(words[4])) > 400 and int(words[3]) + int(words[6]) > 0
    finally:
        wire.kill()
        wire.wait()
