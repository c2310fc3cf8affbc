"""A disk, a memory or a processor that is taken away for a while costs a run what it could not do, and no more."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fairseq_async.errors import HalfAppliedError
from fairseq_async.exchange import Channel, shared_memory
from fairseq_async.exchange.linux import environment
from fairseq_async.exchange.stream import Stream
from fairseq_async.launch import output
from fairseq_async.protocol import Hello, Initialise, Push, Report, ScheduleEvent, Status
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.direct import DirectAttack
from scripts.faults.sgd_server import build
from scripts.faults.thread_server import ThreadServer
from tests.helpers import failing_server, in_process
from tests.helpers.commands import ROOT, Processes, launch_command
from tests.helpers.launched import count, server_of
from tests.helpers.run_files import events
from tests.helpers.server_client import LAYOUT, METHOD, StartServer, StartThreadServer, join, join_patiently, pull, push
from tests.helpers.waiting import wait_until


@pytest.fixture
def on_a_small_disk(tmp_path: Path) -> Any:
    """``on_a_small_disk(what)``: what :mod:`tests.helpers.small_disk` finds."""
    mounts = f"mount -t tmpfs none {tmp_path} && mount --bind {tmp_path} {tmp_path}"
    mounts += f" && mount -o remount,bind,ro {tmp_path}"
    there = shutil.which("unshare")
    if not there or subprocess.run([there, "-m", "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here, which takes the program unshare and the right to use it")

    def run(what: str) -> dict[str, Any]:
        (tmp_path / "run").mkdir()
        job = [sys.executable, "-m", "tests.helpers.small_disk", what, str(tmp_path / "run")]
        variables = os.environ | environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(job, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"said": done.stderr}

    return run


@pytest.mark.parametrize("what", ["full", "full in shards"])
def test_a_run_goes_on_with_a_full_disk_and_writes_again_when_there_is_room(on_a_small_disk: Any, what: str) -> None:
    found = on_a_small_disk(what)
    assert found["running"] and found["version"] == 40 and found["statuses"] == ["applied"]
    assert found["sequences"][0] == 0 and found["sequences"][-20:] == list(range(20, 40))
    assert len(found["sequences"]) < 40, "the disk was there all the time"
    assert found["said"].count("events are not recorded: the disk is full; make room in ") == 1
    assert found["said"].count("a snapshot could not be written") == 1
    assert found["snapshots"] >= 1 and len(found["log"]) < 20_000


def test_a_worker_prints_on_to_a_full_disk_and_its_log_says_what_is_missing(on_a_small_disk: Any) -> None:
    found = on_a_small_disk("prints")
    assert (found["code"], found["words"]) == (3, "after")
    (lost,) = re.findall(r"\nfairseq-async: (\d+) bytes of output could not be written here\n", found["log"])
    note = len(f"\nfairseq-async: {lost} bytes of output could not be written here\n")
    assert found["log"].startswith("before\n") and found["log"].endswith("after\n")
    assert len(found["log"]) - note + int(lost) == len("before\n") + 3000 * 1000 + len("after\n")


def test_each_gap_in_a_log_has_its_own_line_and_none_has_two(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(full=False, has=b"")

    def write(data: bytes) -> int:
        if disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.has += data
        return len(data)

    def printed() -> Iterator[bytes]:
        for line, disk.full in ((b"a\n", False), (b"bb\n", True), (b"c\n", False), (b"d\n", False), (b"e\n", True)):
            yield line
        disk.full = False
        yield b"f\n"
        yield b""

    lines = printed()
    pipe = nullcontext(SimpleNamespace(read=lambda most: next(lines)))
    monkeypatch.setattr(output, "open", lambda *_, **__: pipe, raising=False)
    output.Output()._write(-1, cast(Any, SimpleNamespace(write=write)))
    gap = "\nfairseq-async: {} bytes of output could not be written here\n".format
    assert disk.has.decode() == f"a\n{gap(3)}c\nd\n{gap(2)}f\n"


def test_a_run_goes_on_in_a_directory_that_has_become_read_only(on_a_small_disk: Any) -> None:
    found = on_a_small_disk("read-only")
    assert found["running"] and found["version"] == 40 and found["sequences"] == list(range(40))
    assert "a snapshot could not be written" in found["said"] and found["snapshots"] >= 1


def test_a_worker_for_which_there_is_no_shared_memory_is_told_so_and_the_others_go_on(on_a_small_disk: Any) -> None:
    found = on_a_small_disk("no shared memory")
    assert found["running"] and found["version"] == 40 and found["sequences"] == list(range(40))
    assert "no room in /dev/shm: parameters and slots need" in found["joiner"]


@pytest.mark.usefixtures("executed")  # of what a fork has, more is in use already
def test_a_server_without_memory_for_more_goes_on_with_what_it_has(on_a_small_disk: Any) -> None:
    found = on_a_small_disk("no memory")
    assert found["running"] and found["version"] == 40 and found["statuses"] == ["applied"]


def test_a_message_for_which_there_is_no_memory_costs_its_sender_the_connection_alone(
    start_thread_server: StartThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_thread_server(2)
    honest = join(server, 0)
    read = Stream.read

    def read_little(stream: Stream, flags: int = 0) -> bytes:
        if stream.connection.getpeername() == name:
            raise MemoryError
        return read(stream, flags)

    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as greedy:
        name = greedy.getsockname()
        Channel(greedy).receive()
        monkeypatch.setattr(Stream, "read", read_little)
        greedy.sendall(b"x")
        assert greedy.recv(1) == b""
    assert push(honest, 0, 0.5).status is Status.APPLIED
    assert server.service.refusals.counts["no message"] == 1


def test_an_update_that_fails_halfway_ends_the_server_and_the_next_one_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(failing_server.MARKER, str(tmp_path / "failed"))
    server = ServerProcess("tests.helpers.failing_server", 1, tmp_path, tmp_path / "server.log", restarts=1)
    try:
        worker = join_patiently(server, 0, workers=1, snapshot_seconds=1e-3)
        for number in range(4):
            assert push(worker, number, 0.5).status is Status.APPLIED
            pull(worker)
        values = torch.empty(LAYOUT.size)
        worker.pull(values.copy_)
        assert values.max() < 1.0, "no part of the failed update is left"
    finally:
        server.stop()
    assert "the server ended with code 1, and was started again from version-" in capfd.readouterr().err
    assert (
        "HalfAppliedError: the update of worker 0 was not applied to its end" in (tmp_path / "server.log").read_text()
    )


def test_a_rule_that_fails_is_no_mistake_to_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failing_server.MARKER, str(tmp_path / "failed"))
    attack = DirectAttack(tmp_path / "run", failing_server.build, METHOD, LAYOUT, seed=0)
    attack.step()
    attack.step()
    with pytest.raises(HalfAppliedError):
        attack.step()


def test_a_server_that_is_stopped_amid_a_publication_holds_up_readers_and_loses_none(
    thread_server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGSTOP there: the worker gives up, connects again, and reads whole parameters when the server goes on."""
    first, second = (join_patiently(thread_server, worker) for worker in (0, 1))
    go_on, whole = threading.Event(), shared_memory.copy
    monkeypatch.setattr(shared_memory, "_PATIENCE", 0.3)

    def stop(target: Tensor, source: Tensor) -> None:
        whole(target[:3], source[:3])
        go_on.wait(10)
        whole(target, source)

    monkeypatch.setattr(shared_memory, "copy", stop)
    with ThreadPoolExecutor(2) as pool:
        pushed = pool.submit(push, first, 0, 0.5)
        wait_until(lambda: int(second.memory.shared._header[0]) % 2 == 1 if second.memory.shared else False)
        pulled = pool.submit(pull, second)
        threading.Event().wait(1.0)
        assert not pulled.done()
        go_on.set()
        assert pushed.result(10).status is Status.APPLIED and pulled.result(20) == (1, 0.5)


@pytest.fixture
def thread_server(tmp_path: Path) -> Iterator[ThreadServer]:
    """One whose workers share memory with it."""
    with ThreadServer(2, tmp_path) as server:
        yield server


def test_a_servers_pause_of_nine_times_the_timeout_costs_the_pause(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    flags = ["--max-update", 60, "--disable-validation", "--worker-timeout", 1]
    launcher = processes.start(launch_command(data, 2, tmp_path, *flags, launcher=["--slowdown", "5,5"]))
    wait_until(lambda: min(count(tmp_path, 0), count(tmp_path, 1)) > 5, 90)
    paused = server_of(tmp_path)
    os.kill(paused, signal.SIGSTOP)
    threading.Event().wait(9.0)
    before = count(tmp_path, 1)
    os.kill(paused, signal.SIGCONT)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    sequences = [event["sequence"] for event in events(tmp_path) if event["worker"] == 1]
    assert sequences == list(range(len(sequences)))
    assert len(sequences) > before, "it goes on after the pause"


def test_a_storm_of_connections_with_the_token_costs_no_update(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(workers=2)
    honest = join(server, 0)
    for number in range(150):
        other = join(server, 1)
        other.connection.channel.close()  # without a word
        other.connection.left.set()
        assert push(honest, number, 0.25, base=number).status is Status.APPLIED
    assert [event["sequence"] for event in events(tmp_path)] == list(range(150))


def test_a_flood_of_epochs_is_kept_to_what_an_update_may_have(tmp_path: Path) -> None:
    service = in_process.new_service(1, tmp_path, build, lambda: 1000.0)
    worker = in_process.Connection(service)
    worker.introduce(0)
    worker.send(Hello(METHOD, LAYOUT, remote=False))
    worker.send(Initialise(False))
    answers = []
    for number in range(100):
        worker.send(ScheduleEvent(f"a-{number}", "begin_epoch", number))
        answers.append(worker.last["kind"])
    assert answers == ["schedule_reply"] * 64 + ["error"] * 36
    assert worker.send(Push(0, 0, 1.0, Report())) and worker.last["status"] == "applied"
    worker.send(ScheduleEvent("b", "begin_epoch", 101))
    assert worker.last["kind"] == "schedule_reply"
    in_process.end(service)
