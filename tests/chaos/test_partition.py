"""A cable that is pulled out for a while: nobody is told by the network, and the work goes on when it is back."""

import os
import subprocess
import sys
import time
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


def test_a_worker_goes_on_after_a_partition(machines: Machines, processes: Processes, tmp_path: Path) -> None:  # noqa: F811
    if not machines.prefixes[0]:
        pytest.skip("no network namespaces here")
    token, address = new_token(), f"{machines.address}:{free_port()}"
    host, port = address.split(":")
    line = [*machines.prefixes[0], sys.executable, "-c", _SERVER, host, port, str(tmp_path)]
    server = subprocess.Popen(line, env=os.environ | {TOKEN: token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"listens\n"
        worker = processes.start(
            [*machines.prefixes[1], sys.executable, "-m", "tests.chaos.steady_worker", address], **{TOKEN: token}
        )
        assert worker.stdout is not None
        while int(worker.stdout.readline()) < 5:
            pass
        name = machines.prefixes[0][3]
        ip("-n", name, "link", "set", "cable", "down")
        time.sleep(_OUT)
        before = audit(tmp_path).applied
        ip("-n", name, "link", "set", "cable", "up")
        while int(worker.stdout.readline()) < before + 20:
            pass
        assert worker.poll() is None
        found = audit(tmp_path)
        assert found.applied == found.version >= before + 20 and not found.rollbacks
    finally:
        assert server.stdin is not None
        server.stdin.close()  # the lifeline
        server.wait(10)
