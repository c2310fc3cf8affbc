"""A server process and its clients over loopback, with a rule that needs no fairseq."""

import fcntl
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.options.config import ServerOptions
from fairseq_async.protocol import (
    Status,
)
from fairseq_async.protocol.notices import RUN_FINISHED, RUN_OVER
from fairseq_async.records.state_files import ending_path
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start import run_directory
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from scripts.faults.thread_server import ThreadServer
from tests.helpers.server_client import LAYOUT, SGD_SERVER, join, pull, push
from tests.helpers.stand_ins import Time


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(SGD_SERVER, 2, tmp_path, tmp_path / "server.log")
    yield process
    process.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    with ThreadServer(2, tmp_path) as server:
        yield server


def test_a_server_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: None
) -> None:
    project, named = tmp_path / "project", ("queue.py", "random.py", "types.py", "yaml.py", "torch/__init__.py")
    for name in named:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("raise RuntimeError('the module of this project')\n")
    monkeypatch.chdir(project)
    process = ServerProcess(SGD_SERVER, 1, tmp_path / "run", tmp_path / "server.log")
    try:
        assert push(join(process, 0, patience=60.0), 0, 0.5).version == 1
    finally:
        process.stop()


def test_two_runs_do_not_share_a_directory(
    process: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_async.worker.start.run_directory._BUSY_SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match=r"\(--run-dir\) is in use by another run"):
        ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "log")
    with pytest.raises(ConfigurationError, match=r"\(run_dir=\) is in use by another run"):  # that of a script
        ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "log", run_dir_option="run_dir=")


@pytest.mark.parametrize(("ending", "seconds"), [(True, 120.0), (False, 10.0)], ids=["it writes", "it is gone soon"])
def test_a_run_waits_longer_for_a_last_snapshot_than_for_a_server_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: bool, seconds: float
) -> None:
    time = Time()
    monkeypatch.setattr(run_directory, "time", time)
    monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=BlockingIOError))
    if ending:
        ending_path(tmp_path).touch()
    with pytest.raises(ConfigurationError, match=r"\(--run-dir\) is in use by another run"):
        run_directory.claim(tmp_path, "--run-dir")
    assert time.now - 1000.0 == pytest.approx(seconds, abs=0.2)
    assert ending_path(tmp_path).exists() == ending, "it is the other run's"


def test_a_run_waits_for_the_server_before_that_is_still_in_a_long_step(tmp_path: Path) -> None:
    """Its launcher was killed, and it has not noticed yet."""
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, [held]).start()
    ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "log").stop()


def test_the_run_ends_for_all_at_the_last_version_and_the_server_with_the_last_worker(process: ServerProcess) -> None:
    assert process._standby is None, "which is not started again"
    first, second = join(process, 0, last_version=1), join(process, 1, last_version=1)
    assert push(first, 0, 0.5).finished
    answer = push(second, 0, 0.5)
    assert answer.status is Status.FINISHED and answer.version == 1
    first.leave(finished=True)
    assert process.process.poll() is None
    second.leave(finished=False)
    assert process.process.wait(timeout=60) == 0


def test_a_finished_run_stays_for_a_worker_0_that_has_died_and_comes_back(process: ServerProcess) -> None:
    """It has the last checkpoint to write."""
    first, second = join(process, 0, last_version=1), join(process, 1, last_version=1)
    assert push(first, 0, 0.5).finished
    first.connection.channel.close()
    second.leave(finished=False)
    again = Client(LastingConnection(process.address, process.token, 0))
    assert again.join(LAYOUT, sgd_spec(last_version=1)).finished and pull(again) == (1, 0.5)
    again.leave(finished=False)
    assert process.process.wait(timeout=60) == 0


def test_the_last_state_of_a_run_is_kept_where_worker_0_hangs_at_its_end(
    process: ServerProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, float] = {"last_version": 1, "worker_timeout": 0.5}
    first, second = join(process, 0, **short), join(process, 1, **short)
    assert push(first, 0, 0.5).finished
    second.leave(finished=False)
    process.join(30)
    assert process.poll() == 0 and "the last parameters are kept" in capfd.readouterr().err
    assert (tmp_path / "snapshots" / "version-000000000001.pt").exists()


def test_a_server_that_dies_is_an_error_at_once(process: ServerProcess) -> None:
    client = join(process, 0)
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(ExchangeError, match="is gone"):
        push(client, 0, 0.5)


def test_a_server_ends_with_the_process_that_started_it(process: ServerProcess) -> None:
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(timeout=60) == 0


def test_a_server_is_stopped_in_a_directory_that_has_become_read_only(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        process.stop()
    assert process.process.returncode is not None


def test_no_server_and_a_port_in_use_are_clear(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError,
            match=rf"^--server .*:{port} cannot be used: \S+ \S+ Address already in use; give another$",
        ):
            ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "log", port=port)
    with socket.socket() as silent:  # bound, and nobody listens
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(ExchangeError, match=f"no server at 127.0.0.1:{port}: "):
            Client(LastingConnection(f"127.0.0.1:{port}", "token", 0))
    with pytest.raises(ExchangeError, match="no server at nowhere"):
        Client(LastingConnection("nowhere", "token", 0))


def test_a_server_that_does_not_start_is_clear(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="the server did not start; see .*server.log"):
        WorkerContext().connect("no.such.module", ServerOptions(server_timeout=1), tmp_path, print)
    assert "No module named 'no'" in (tmp_path / "logs" / "server.log").read_text()


@pytest.mark.usefixtures("executed")  # a fork does not import this module
def test_what_an_imported_library_prints_goes_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a word from a library')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process = ServerProcess(SGD_SERVER, 1, tmp_path / "run", tmp_path / "server.log")
    try:
        join(process, 0).leave(finished=True)
        process.join(60.0)  # it writes what it has kept of its output when it ends, not when it is killed
    finally:
        process.stop()
    assert "a word from a library" in (tmp_path / "server.log").read_text()


def test_a_server_that_a_worker_has_started_ends_when_all_workers_have_left(tmp_path: Path) -> None:
    """Also when the run is not finished: without a launcher nobody starts a worker again."""
    server = ServerProcess(SGD_SERVER, 2, tmp_path, tmp_path / "server.log", ends_with_workers=True)
    try:
        first, second = join(server, 0), join(server, 1)
        push(first, 0, 0.5)
        first.leave(finished=False)
        push(second, 0, 0.5)  # the server stays for it
        second.leave(finished=False)
        second.leave(finished=False)  # does nothing, as at the exit of a process that has left before
        server.join(30)
        assert server.poll() == 0
    finally:
        server.stop()


def test_a_server_that_is_discarded_or_cannot_start_leaves_no_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "first"
    ServerProcess(SGD_SERVER, 1, run_dir, run_dir / "logs" / "server.log").discard()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="cannot be used"):
        ServerProcess(SGD_SERVER, 1, run_dir, run_dir / "logs" / "server.log", port=taken.getsockname()[1])
    with pytest.raises(ConfigurationError, match="cannot be made: embedded null"):
        ServerProcess(SGD_SERVER, 1, tmp_path / "a\0b", tmp_path / "server.log")
    with pytest.raises(ConfigurationError, match="cannot spell it: set PYTHONUTF8=1"):  # as in an ASCII locale
        ServerProcess(SGD_SERVER, 1, tmp_path / "r\udcc3\udca4um", tmp_path / "server.log")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_clear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a file system that is mounted for reading."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} \(--run-dir\) cannot be written to"):
        ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "log")


def test_how_long_a_server_that_was_asked_to_end_may_take_and_its_last_lines_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server: Any = MagicMock(_starting=nullcontext())
    ServerProcess.end(server)
    server.process.wait.side_effect = subprocess.TimeoutExpired("server", 3.0)
    ServerProcess.end(server, 3.0)
    assert [each.args for each in server.process.wait.call_args_list] == [(120.0,), (3.0,)]
    assert [each.args for each in server._printing.join.call_args_list] == [(1.0,)] * 2
    said = capsys.readouterr().err
    assert said == "fairseq-async: the server has not written its last snapshot within 3 s, and is killed\n"
    assert server.stop.call_count == 2
    ended: Any = MagicMock(_has_standby=False)
    ServerProcess._wait(ended)
    ended._printing.join.assert_called_once_with(1.0)


def test_worker_0_waits_longer_for_its_server_alone_than_before_it_tells_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = list[float | None]()
    for workers in (1, 2):
        server: Any = ServerProcess.__new__(ServerProcess)
        server._workers, server.over = workers, SimpleNamespace(wait=lambda seconds=None: waits.append(seconds))
        server.outlast_workers()
    assert waits == [20.0, None, 2.0, None]
    assert capsys.readouterr().err.count("its server stays for the other workers") == 2


def test_a_run_is_over_no_more_when_a_worker_comes_back_after_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the launcher would give that worker the few seconds of one that hangs."""
    server: Any = ServerProcess.__new__(ServerProcess)
    server.finished, server.over, states = threading.Event(), threading.Event(), []
    for said in ([], [RUN_FINISHED], [RUN_FINISHED, RUN_OVER], [RUN_OVER, "a line", RUN_FINISHED]):
        reader, writer = os.pipe()
        os.write(writer, "".join(f"{line}\n" for line in said).encode())
        os.close(writer)
        server._pass_on(reader, None)
        states.append((server.finished.is_set(), server.over.is_set()))
    assert states == [(False, False), (True, False), (True, True), (True, False)]
    assert capsys.readouterr().err == "fairseq-async: a line\n"
