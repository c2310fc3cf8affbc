"""SIGTERM to a worker that has started its server."""

import signal
import subprocess
import sys

from tests.helpers.commands import Processes

WORKER = """
import multiprocessing, signal, sys, time
from fairseq_async.worker.start.process import end_server_on_sigterm

class Server:
    def end(self):
        print("ends", flush=True)
        time.sleep(SECONDS)
        print("has ended", flush=True)

BEFORE
end_server_on_sigterm(Server())
print("there", flush=True)
time.sleep(30)
"""


def worker(processes: Processes, seconds: float = 0.1, before: str = "") -> "subprocess.Popen[str]":
    script = WORKER.replace("SECONDS", str(seconds)).replace("BEFORE", before)
    process = processes.start([sys.executable, "-c", script])
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_the_process_ends_of_the_signal_when_its_server_has_ended(processes: Processes) -> None:
    process = worker(processes)
    process.terminate()
    assert process.communicate(timeout=20) == ("ends\nhas ended\n", None)
    assert process.returncode == -signal.SIGTERM


def test_a_second_signal_ends_it_at_once(processes: Processes) -> None:
    process = worker(processes, seconds=30)
    process.terminate()
    assert process.stdout is not None and process.stdout.readline() == "ends\n"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_the_last_server_of_several_is_the_one_that_is_ended(processes: Processes) -> None:
    """A script without a launcher may take part in one run after another."""
    process = worker(processes, before="end_server_on_sigterm(None)")
    process.terminate()
    assert process.communicate(timeout=20)[0] == "ends\nhas ended\n"


def test_a_handler_of_the_scripts_own_stays(processes: Processes) -> None:
    process = worker(processes, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit('mine'))")
    process.terminate()
    assert process.communicate(timeout=20)[0] == "mine\n"


def test_a_process_that_was_forked_from_it_ends_without_ending_the_server(processes: Processes) -> None:
    """multiprocessing ends the processes of a pool by SIGTERM."""
    after = """
def wait(there):
    there.set()
    time.sleep(30)

fork = multiprocessing.get_context("fork")
there = fork.Event()
child = fork.Process(target=wait, args=(there,))
child.start()
there.wait()  # Python forgets a signal that comes during the fork
child.terminate()
child.join()
sys.exit(child.exitcode)
"""
    script = WORKER.replace("BEFORE", "").replace('print("there", flush=True)', after)
    assert processes.run([sys.executable, "-c", script], 20) == (256 - signal.SIGTERM, "")
