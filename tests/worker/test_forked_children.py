"""A worker that is killed is gone at once, although a child that it has forked lives on for a while."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_async.errors import LOST_SERVER, USER_ERROR, AsyncError, ExchangeError, RefusedError
from fairseq_async.worker.start import process
from scripts.faults.thread_server import ThreadServer
from tests.helpers.waiting import wait_until

PROGRAM = """
import os, signal, sys, time
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
client = Client(LastingConnection(sys.argv[1], sys.argv[2], 0))
if (child := os.fork()) == 0:
    time.sleep(60)
print(child, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_connection_of_a_worker_that_is_killed_ends_though_its_data_loader_lives_on(tmp_path: Path) -> None:
    """Else the server would refuse the worker that is started again: it is here already."""
    server = ThreadServer(1, tmp_path)
    line = [sys.executable, "-c", PROGRAM, server.address, server.token]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        child = int(worker.stdout.readline())
        try:
            assert set(server.service.membership.members) == {0}
            worker.stdin.close()
            assert worker.wait(60) == -signal.SIGKILL
            wait_until(lambda: not server.service.membership.members, 10)
            os.kill(child, 0)  # it is there
        finally:
            os.kill(child, signal.SIGKILL)
            server.stop()


@pytest.mark.parametrize(
    ("reason", "code"), [(ExchangeError("it is gone"), LOST_SERVER), (RefusedError("not you"), USER_ERROR)]
)
def test_a_worker_without_its_server_ends_with_the_code_by_which_its_launcher_starts_it_again_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: AsyncError, code: int
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        process.end_process(reason)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"fairseq-async: error: {reason}\n"


def test_a_process_ends_the_servers_that_it_has_started_and_none_of_the_process_that_it_was_forked_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    owners = (os.getppid(), os.getpid(), os.getpid())
    servers = [SimpleNamespace(end=lambda why, number=number: ended.append(number)) for number in range(3)]
    monkeypatch.setattr(process, "_own", list(zip(owners, servers, strict=True)))
    process.end_own_servers()
    assert ended == [1, 2]
