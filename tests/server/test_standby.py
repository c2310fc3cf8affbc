"""The process that waits to become the server, and what ends with a server."""

import errno
import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from fairseq_async.cli import run
from fairseq_async.environment import RENDEZVOUS, TOKEN
from fairseq_async.launch import launcher, serve
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.options import LaunchOptions
from fairseq_async.launch.progress.display import Display
from fairseq_async.options.config import ServerOptions
from fairseq_async.protocol import (
    Status,
)
from fairseq_async.protocol.standby import Adopted, Standby, is_orphan
from fairseq_async.worker.start import context
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import (
    SGD_SERVER,
    StartServer,
    join_patiently,
    kill,
    pull,
    push,
)
from tests.helpers.waiting import has_ended, wait_until


def test_a_server_that_is_told_to_end_with_all_others_keeps_what_it_has(
    start_server: StartServer, tmp_path: Path
) -> None:
    """DeepSpeed's launcher sends SIGTERM to all that a rank has started, then to the rank. Slurm can send any signal to
    every process of a job, as a warning of its end."""
    server = start_server(restarts=1)
    first = join_patiently(server, 0, snapshot_seconds=1e6)
    wait_until(lambda: snapshot_versions(tmp_path) == [0])
    process = server.process
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process.pid, number)
        os.kill(standby := standby_of(server), number)
    push(first, 0, 0.125)
    assert not has_ended(standby)
    server.end()  # as when the process that has started it is gone
    assert server.process is process and process.returncode == 0
    assert snapshot_versions(tmp_path)[-1:] == [1]


def standby_of(server: ServerProcess) -> int:
    """Its process, which says its number when the server has forked it."""
    assert server._standby is not None
    return int(server._standby._ours.recv(32, socket.MSG_PEEK))


def test_the_standby_becomes_the_server_and_another_one_waits(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(restarts=2)
    first = join_patiently(server, 0, snapshot_seconds=1e-3)
    standby = standby_of(server)
    assert os.getsid(standby) not in (os.getsid(0), os.getsid(server.process.pid)), "a signal to all does not end both"
    push(first, 0, 0.5)
    wait_until(lambda: snapshot_versions(tmp_path)[-1:] == [1])
    kill(server)
    assert push(first, 1, 0.25, base=1).status is Status.APPLIED and server.process.pid == standby
    assert pull(first) == (2, 0.25)
    standby = standby_of(server)
    kill(server)
    assert push(first, 2, 0.125, base=2).status is Status.APPLIED and server.process.pid == standby
    wait_until(lambda: server._standby is None)  # the server will not be started again


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_comes_back_without_its_standby_and_a_standby_that_dies_is_replaced(
    start_server: StartServer, replaced: bool
) -> None:
    server = start_server(restarts=2)
    first = join_patiently(server, 0, snapshot_seconds=1e-3)
    standby, line = standby_of(server), server._standby
    os.kill(standby, signal.SIGKILL)
    if replaced:
        wait_until(lambda: server._standby is not line and server._standby is not None, 30)
        assert server._standby is not None and server._standby.process is not None
        standby = server._standby.process.pid
    kill(server)
    assert push(first, 0, 0.5).status is Status.APPLIED
    assert (server.process.pid == standby) is replaced
    standby = standby_of(server)
    kill(server)
    assert push(first, 1, 0.25, base=1).status is Status.APPLIED and server.process.pid == standby


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("who", ["a worker", "a script's launcher", "fairseq's launcher", "serve"])
def test_whoever_starts_a_server_asks_for_a_standby_unless_the_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: str, without: bool
) -> None:
    class StartedError(Exception):
        pass

    def start(*args: object, standby: bool, **others: object) -> None:
        asked.append(standby)
        raise StartedError

    asked, flags = list[bool](), ["--no-standby"] * without
    for module in (context, launcher, serve):
        monkeypatch.setattr(module, "ServerProcess", start)
        monkeypatch.setattr(module, "interrupt_on_signals", lambda: None, raising=False)
    monkeypatch.setattr(Display, "__enter__", lambda _: None)
    monkeypatch.setattr(Display, "__exit__", lambda *_: None)
    with pytest.raises(StartedError):
        if who == "a worker":
            context.WorkerContext().connect("module", ServerOptions(no_standby=without), tmp_path, print)
        elif who == "a script's launcher":
            script = ScriptCommand(["true"], tmp_path, resumes=False)
            script.rendezvous.answer("127.0.0.1:7")
            for name, value in {RENDEZVOUS: str(tmp_path), TOKEN: "secret"}.items():
                monkeypatch.setenv(name, value)
            context.WorkerContext()._find_server("module", ServerOptions(no_standby=without), tmp_path, resumes=False)
            launcher.Launcher(script, LaunchOptions(1, max_restarts=1))._start_server_of_script(script.rendezvous)
        elif who == "fairseq's launcher":
            job = ["fairseq-train", "data", "--optimizer", "hybrid_async", "--save-dir", str(tmp_path), *flags]
            launcher.Launcher(WorkerCommand(job), LaunchOptions(1, max_restarts=1)).run()
        else:
            (tmp_path / "token").write_text("8f" * 16)
            (tmp_path / "token").chmod(0o600)
            own = ["--regions", "1", "--run-dir", str(tmp_path), "--token-file", str(tmp_path / "token"), *flags]
            run.app(["serve", "127.0.0.1:0", *own], standalone_mode=False)
    assert asked == [not without]


def test_a_server_without_a_standby_has_none_though_it_may_be_started_again(tmp_path: Path) -> None:
    server = ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "server.log", restarts=1, standby=False)
    assert server._standby is None
    server.stop()


def test_a_server_that_was_a_standby_ends_in_order(start_server: StartServer) -> None:
    server = start_server(workers=1, restarts=2)
    first = join_patiently(server, 0)
    standby_of(server)
    kill(server)
    assert push(first, 0, 0.5).status is Status.APPLIED
    first.leave(finished=True)
    wait_until(lambda: server.poll() == 0 and server.restarts == 1)


@pytest.mark.parametrize("how", ["end", "stop", "finished", "starter is gone"])
def test_a_standby_ends_with_its_server(start_server: StartServer, how: str) -> None:
    server = start_server(workers=1, restarts=1)
    first = join_patiently(server, 0)
    standby = standby_of(server)
    if how == "finished":
        first.leave(finished=True)
    elif how == "starter is gone":
        assert server._standby is not None
        server._standby._ours.close()
    else:
        (server.end if how == "end" else server.stop)()
    wait_until(lambda: has_ended(standby), 30)


def test_a_server_and_its_standby_end_with_a_killed_starter_of_which_a_fork_lives_on(
    tmp_path: Path, executed: None
) -> None:
    """A data loader's process of a worker 0 that was killed has all that worker 0 had open."""
    reader, writer = os.pipe()
    starter = os.fork()
    if starter == 0:
        try:
            server = ServerProcess(SGD_SERVER, 1, tmp_path, tmp_path / "server.log", restarts=1)
            numbers = [server.process.pid, standby_of(server)]
            if (fork := os.fork()) > 0:
                os.write(writer, json.dumps([*numbers, fork]).encode())
            signal.pause()
        finally:
            os._exit(1)
    *processes, fork = json.loads(os.read(reader, 100))
    try:
        os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)
        for each in processes:
            wait_until(lambda each=each: has_ended(each), 30)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_standby_that_is_stopped_holds_nobody_up_and_becomes_no_second_server(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(restarts=1)
    first = join_patiently(server, 0)
    standby = standby_of(server)
    os.kill(standby, signal.SIGSTOP)
    monkeypatch.setattr("fairseq_async.protocol.standby._ANSWER_SECONDS", 0.2)
    kill(server)
    assert push(first, 0, 0.5).status is Status.APPLIED and server.process.pid != standby
    wait_until(lambda: has_ended(standby))


def test_how_long_a_standby_may_take_to_begin_and_to_end() -> None:
    standby: Any = Standby.__new__(Standby)
    standby.process, standby._ours = None, MagicMock()
    standby._ours.recv.side_effect = TimeoutError
    assert standby._number() == 0
    assert standby._ours.mock_calls == [call.settimeout(10.0), call.recv(32), call.shutdown(socket.SHUT_RDWR)]
    standby._ours = MagicMock()
    standby._ours.recv.side_effect = [b"begins", b""]
    standby.process = subprocess.Popen(["sleep", "60"])
    standby.end()
    assert standby.process.returncode == -signal.SIGKILL, "it is no zombie"
    ending = [call.shutdown(socket.SHUT_WR), call.settimeout(1.0), call.recv(32), call.recv(32), call.close()]
    assert standby._ours.mock_calls == ending


@pytest.mark.parametrize("succeed", [0, 1])
def test_a_server_begins_without_a_standby_where_there_is_no_room_for_a_process(
    monkeypatch: pytest.MonkeyPatch, succeed: int
) -> None:
    fork, left = os.fork, [None] * succeed

    def scarce() -> int:
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", scarce)
    assert not is_orphan()


def test_a_server_that_was_a_standby_is_no_zombie_where_this_process_takes_over_orphans() -> None:
    """As the first process of a container. It takes half a second to end."""
    end, until_then = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(until_then)
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    threading.Timer(0.5, os.close, [until_then]).start()
    assert Adopted(child, open(os.devnull, "wb")).wait(60) == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_server_that_is_killed_while_it_is_started_again_costs_one_restart_more(
    start_server: StartServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start_server(restarts=3)
    first = join_patiently(server, 0)
    for restarts in (2, 1):  # the next one is killed as soon as it is there
        pid = server.process.pid
        kill(server)
        wait_until(lambda pid=pid: server.process.pid != pid)  # type: ignore[misc]
        assert server.restarts == restarts
    kill(server)
    assert push(first, 0, 0.5).status is Status.APPLIED and server.restarts == 0
    assert "the one that was to go on has died at once" in capfd.readouterr().err
    kill(server)
    wait_until(lambda: server.poll() == -signal.SIGKILL)
    assert "cannot be started again" not in capfd.readouterr().err


def test_a_standby_that_dies_again_and_again_is_started_ever_more_rarely() -> None:
    server: Any = ServerProcess.__new__(ServerProcess)
    pauses = list[float]()
    server.restarts, server._has_standby, server._starting = 1, True, nullcontext()
    server._printing = SimpleNamespace(join=pauses.append, is_alive=lambda: len(pauses) < 4)
    server._standby, server.process = SimpleNamespace(is_gone=True), SimpleNamespace(wait=lambda: 7)
    server._spawn = lambda *given: (None, os.open(os.devnull, os.O_RDONLY))
    assert server._wait() == 7 and [pause / pauses[0] for pause in pauses[:4]] == [1, 2, 4, 8]


def test_a_server_that_cannot_be_started_again_is_tried_ever_more_rarely_and_not_for_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server: Any = ServerProcess.__new__(ServerProcess)
    pauses, closed = list[float](), list[bool]()
    server.restarts, server.over = 20, threading.Event()
    server._wait = lambda: 7
    server._recover = MagicMock(side_effect=OSError("no memory"))
    server._end_standby = lambda: None
    server._stopping = SimpleNamespace(is_set=lambda: False, wait=pauses.append)
    server._listener = SimpleNamespace(close=lambda: closed.append(True))
    server._supervise()
    assert pauses == [1, 2, 3, 4, 5] and server.restarts == 14
    assert server.poll() == 7 and server.over.is_set() and closed, "no worker waits for it any more"
    said = capsys.readouterr().err
    assert said.count("cannot be started again yet: no memory") == 5 and said.count("started again: no memory") == 1


def test_after_a_start_that_has_succeeded_failures_count_anew(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = ServerProcess.__new__(ServerProcess)
    pauses, failure = list[float](), OSError("no memory")
    server.restarts, server.over = 20, threading.Event()
    server._wait = MagicMock(side_effect=[7, 7, 7, 7, 7, 0])
    server._recover = MagicMock(side_effect=[failure, failure, "version 1", failure, "version 2"])
    server._end_standby = lambda: None
    server._stopping = SimpleNamespace(is_set=lambda: False, wait=pauses.append)
    server._listener = MagicMock()
    server._supervise()
    assert pauses == [1, 2, 1] and server.restarts == 15 and server.poll() == 0
    assert capsys.readouterr().err.count("was started again from version") == 2
