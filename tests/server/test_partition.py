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
from fairseq_async.options.addresses import free_port
from fairseq_async.reporting.audit import audit
from fairseq_async.worker.start.server_process import TOKEN
from scripts.faults.hosts import Cable, Host, bad_cable, set_cable
from tests.helpers.commands import Processes

_OUT = 5.0  # seconds, more than twice --worker-timeout
_SERVER = """
import os, socket, sys
host, port, run_dir = sys.argv[1:]
listener = socket.create_server((host, int(port)))
listener.set_inheritable(True)
print("listens", flush=True)
rim = ["--listener", str(listener.fileno()), "--workers", "1", "--run-dir", run_dir]
os.execv(sys.executable, [sys.executable, "-m", "scripts.faults.sgd_server", *rim])
"""


@contextmanager
def server(host: str, token: str, run_dir: Path) -> Iterator[str]:
    """A server on this machine; yields its address."""
    port = str(free_port())
    line = [sys.executable, "-c", _SERVER, host, port, str(run_dir)]
    process = subprocess.Popen(line, env=os.environ | {TOKEN: token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"
        yield f"{host}:{port}"
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the lifeline
        process.wait(60)


def read_until(worker: "subprocess.Popen[str]", number: int) -> None:
    """Until it has taken so many steps."""
    assert worker.stdout is not None
    while (line := worker.stdout.readline()) and int(line) < number:
        pass
    assert line, f"the worker ended with {worker.wait()}"


def test_a_worker_goes_on_after_a_partition(host: Host, processes: Processes, tmp_path: Path) -> None:
    token = new_token()
    with server(host.near, token, tmp_path) as address:
        line = [*host.prefix, sys.executable, "-m", "tests.helpers.adding_worker", "steady", address, "32"]
        worker = processes.start(line, **{TOKEN: token})
        read_until(worker, 5)
        set_cable("down")
        time.sleep(_OUT)
        before = audit(tmp_path).applied
        set_cable("up")
        read_until(worker, before + 20)
        assert worker.poll() is None
        found = audit(tmp_path)
        assert found.applied == found.version >= before + 20 and not found.rollbacks


def test_updates_cross_a_long_thin_cable_that_loses_packets(host: Host, processes: Processes, tmp_path: Path) -> None:
    """200 ms there and back, 1% of the packets lost, 10 Mbit/s; updates of 100 kB, and ``--worker-timeout`` is 2 s."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no TUN devices here: /dev/net/tun cannot be opened")
    near, far = "10.213.78.1", "10.213.78.2"
    with bad_cable(host.prefix[3], near, far, Cable(0.1, 0.01, 1.25e6)) as wire:
        token = new_token()
        with server(near, token, tmp_path) as address:
            line = [*host.prefix, sys.executable, "-m", "tests.helpers.adding_worker", "steady", address, "25000"]
            worker = processes.start(line, **{TOKEN: token})
            read_until(worker, 8)
            found = audit(tmp_path)
            assert found.applied == found.version >= 8 and not found.rollbacks
        words = wire.communicate("", timeout=60)[0].split()  # packets 1234 lost 12 1234 lost 12
        assert min(int(words[1]), int(words[4])) > 400 and int(words[3]) + int(words[6]) > 0
