"""SIGTERM to a worker that has started its server."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import Processes

WORKER = """
import multiprocessing, os, signal, sys, time
from fairseq_async.worker.start.process import end_server_on_sigterm

class Server:
    def end(self):
        print("ends", flush=True)
        time.sleep(SECONDS)
        print("has ended", flush=True)

BEFORE
end_server_on_sigterm(Server())
os.write(1, b"there\\n")  # the signal may come at once, and its handler prints: no print can be within another
while True:
    time.sleep(0.01)  # a signal that comes right before a sleep is handled after it
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def worker(processes: Processes, script: Path, seconds: float = 0.1, before: str = "") -> "subprocess.Popen[str]":
    script.write_text(WORKER.replace("SECONDS", str(seconds)).replace("BEFORE", before))
    process = processes.start([sys.executable, script])
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_the_process_ends_of_the_signal_when_its_server_has_ended(processes: Processes, script: Path) -> None:
    process = worker(processes, script)
    process.terminate()
    assert process.communicate(timeout=20) == ("ends\nhas ended\n", None)
    assert process.returncode == -signal.SIGTERM


def test_a_second_signal_ends_it_at_once(processes: Processes, script: Path) -> None:
    process = worker(processes, script, seconds=30)
    process.terminate()
    assert process.stdout is not None and process.stdout.readline() == "ends\n"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_the_last_server_of_several_is_the_one_that_is_ended(processes: Processes, script: Path) -> None:
    """A script without a launcher may take part in one run after another."""
    process = worker(processes, script, before="end_server_on_sigterm(None)")
    process.terminate()
    assert process.communicate(timeout=20)[0] == "ends\nhas ended\n"


def test_a_handler_of_the_scripts_own_stays(processes: Processes, script: Path) -> None:
    process = worker(processes, script, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit('mine'))")
    process.terminate()
    assert process.communicate(timeout=20)[0] == "mine\n"


def test_a_process_that_was_forked_from_it_ends_without_ending_the_server(processes: Processes, script: Path) -> None:
    """multiprocessing ends the processes of a pool by SIGTERM."""
    after = """
def wait(there):
    there.set()
    while True:
        time.sleep(0.01)

fork = multiprocessing.get_context("fork")
there = fork.Event()
child = fork.Process(target=wait, args=(there,))
child.start()
there.wait()  # Python forgets a signal that comes during the fork
child.terminate()
child.join()
sys.exit(child.exitcode)
"""
    script.write_text(WORKER.replace("BEFORE", "").replace("os.write(1,", f"{after}\n#"))
    assert processes.run([sys.executable, script], 20) == (256 - signal.SIGTERM, "")
