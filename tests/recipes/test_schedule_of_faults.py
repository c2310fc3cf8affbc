"""Schedules are checked, and come about when they say."""

import signal
import socket
import threading
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError
from scripts.faults.fuzzer import frame
from scripts.faults.injector import Injector
from scripts.faults.proxy import Frames, Proxy
from scripts.faults.schedule import Schedule, read


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{kind: kill, target: server}", "give one of at, version and message"),
        ("{kind: kill, target: server, at: 1, version: 2}", "give one of at, version and message"),
        ("{kind: partition, target: server, seconds: 1, at: 1}", "partition is for a worker"),
        ("{kind: kill, target: 0, message: 1}", "kill cannot wait for a message"),
        ("{kind: pause, target: 0, at: 1}", "pause needs seconds"),
        ("{kind: drop, target: 0, seconds: 2, at: 1}", "drop has no seconds"),
        ("{kind: duplicate, target: 0, of: reply, at: 1}", "TCP does not duplicate"),
        ("{kind: explode, target: 0, at: 1}", "faults.0.kind"),
        ("{kind: kill, target: 0, when: 1}", "faults.0.when"),
        ("{kind: kill", "while parsing"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(f"faults:\n  - {line}\n")
    with pytest.raises(ConfigurationError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_processes_are_killed_paused_and_woken_in_time(tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(
        "faults:\n  - {kind: pause, target: 1, seconds: 3, at: 2}\n  - {kind: kill, target: server, version: 10}\n"
    )
    now, version = 100.0, 0
    sent: list[tuple[float, int | str, signal.Signals]] = []
    injector = Injector(
        read(path), None, lambda target, number: sent.append((now, target, number)), lambda: version, lambda: now
    )
    for step in range(9):
        now, version = 100.0 + step, 2 * step
        injector.poll()
    assert sent == [(102.0, 1, signal.SIGSTOP), (105.0, "server", signal.SIGKILL), (105.0, 1, signal.SIGCONT)]
    assert injector.counts == {"pause": 1, "kill": 1}


def test_frames_are_cut_wherever_the_bytes_are() -> None:
    data = frame(b'{"kind": "push"}', b"12345678") + frame(b'{"kind": "alive"}')
    for size in (1, 3, len(data)):
        frames = Frames()
        found = [each for start in range(0, len(data), size) for each in frames.feed(data[start : start + size])]
        assert [message["kind"] for message, _ in found] == ["push", "alive"]
        assert b"".join(whole for _, whole in found) == data


def test_a_proxy_without_a_server_closes_what_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    proxy = Proxy(address)
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        assert client.recv(1) == b""
    proxy.close()
    assert not any(thread.is_alive() for thread in threading.enumerate() if thread in proxy._threads)


def test_an_empty_schedule_does_nothing() -> None:
    injector = Injector(Schedule(faults=()))
    injector.poll()
    assert not injector.happened
