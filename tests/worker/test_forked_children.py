"""A worker that is killed is gone at once, although a child that it has forked lives on for a while."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_async.errors import LOST_SERVER, USER_ERROR, AsyncError, ExchangeError, RefusedError
from fairseq_async.protocol.notices import ENDED, KEPT, SAVED
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
    ended: list[tuple[int, str]] = []
    owners = (os.getppid(), os.getpid(), os.getpid())
    servers = [SimpleNamespace(end=lambda why, number=number: ended.append((number, why))) for number in range(3)]
    monkeypatch.setattr(process, "_own", list(zip(owners, servers, strict=True)))
    monkeypatch.setattr(process, "last_word", lambda: "last")
    process.end_own_servers()
    assert ended == [(1, "last"), (2, "last")]


@pytest.mark.parametrize(
    ("most", "so_far", "failed", "word"),
    [
        ("", "", False, SAVED),
        ("3", "", False, KEPT),
        ("3", "2", False, KEPT),
        ("3", "3", False, SAVED),
        ("3", "0", True, ENDED),
        ("", "", True, ENDED),
    ],
)
def test_the_state_of_a_run_stays_for_ranks_that_torchrun_may_start_again(
    monkeypatch: pytest.MonkeyPatch, most: str, so_far: str, failed: bool, word: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", so_far)
    monkeypatch.setattr(process, "has_failed", lambda: failed)
    assert process.last_word() == word


@pytest.mark.parametrize(
    ("cause", "is_guard"),
    [
        ("DataLoader worker (pid(s) 3) exited unexpectedly with exit code 2.", True),
        ("DataLoader worker (pid(s) 3) exited unexpectedly with exit code 21.", False),
        ("DataLoader worker (pid 3) is killed by signal: Killed.", False),
        ("a script of its own ended with exit code 2.", False),
        (None, False),
    ],
)
def test_a_loader_whose_process_has_imported_the_script_ends_it_with_one_line_and_any_other_error_is_pythons(
    capsys: pytest.CaptureFixture[str], cause: str | None, is_guard: bool
) -> None:
    error, hooked = RuntimeError("DataLoader worker exited"), list[object]()
    error.__cause__ = None if cause is None else RuntimeError(cause)
    with suppress(SystemExit):
        process._end_as_loader(lambda *given: hooked.extend(given), RuntimeError, error, None)
    assert hooked == ([] if is_guard else [RuntimeError, error, None])
    assert ("put the training under if __name__" in capsys.readouterr().err) == is_guard
