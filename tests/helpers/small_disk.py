"""A server and its workers on a disk that is full or read-only for a while; in a mount namespace of its own.

Arguments: what happens (``full``, ``full in shards``, ``read-only``, ``no shared memory``, ``no memory``, ``prints``),
and an empty directory. The log is on this disk too, as a launcher's is. Prints JSON.
"""

import ctypes
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fairseq_async.errors import AsyncError
from fairseq_async.launch.processes import Processes
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import SGD_SERVER, push
from tests.helpers.waiting import wait_until

SHARED = Path("/dev/shm")
LAYOUT = Layout.of([("weight", torch.zeros(25_000)), ("bias", torch.zeros(25_000))])  # 200 kB for each slot
METHOD = sgd_spec(snapshot_seconds=1e-3)
_CLONE_NEWNS = 0x20000
NOT_WRITTEN = "a snapshot could not be written"
PRINTS = """
import sys, time
from pathlib import Path
print("before", flush=True)
while not Path("full").exists():
    time.sleep(0.01)
for _ in range(3000):
    print("x" * 999, flush=True)
Path("printed").touch()
while not Path("room").exists():
    time.sleep(0.01)
print("after", flush=True)
sys.exit(3)
"""


def in_shards() -> MethodSpec:
    options = ServerOptions(server_shards="2", snapshot_seconds=1e-3)
    return local_sgd_spec(methods.parse(LocalSGDOptions, {"local_steps": 1}, "test"), 2, [], options, {})


def own_mounts() -> None:
    """As ``unshare -m``: what is mounted from now on is seen by this process, and by those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mount("--make-rprivate", "/")


def mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all the room that is left."""
    path = directory / "filler"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            try:
                while True:
                    file.write(b"\0")
            except OSError:
                return path


class Printing:
    """The command of a worker that prints more than the disk has room for."""

    on_cpu, synchronous = True, False

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def line(self, address: str | None) -> list[str]:
        return [sys.executable, "-c", f"import os; os.chdir({str(self.run_dir.parent)!r}){PRINTS}"]


def printed(directory: Path) -> dict[str, Any]:
    """What becomes of a worker that prints to a full disk."""
    processes = Processes(Printing(directory), 1)
    (worker,) = processes.workers
    processes.start(worker, None, {})
    try:
        wait_until(lambda: worker.log.read_bytes() == b"before\n")
        fill(directory)
        (directory.parent / "full").touch()
        wait_until(lambda: worker.process.poll() is not None or (directory.parent / "printed").exists())
        (directory / "filler").unlink()
        (directory.parent / "room").touch()
        processes.wait(20.0)
        return {"code": worker.process.poll(), "words": processes.last_words(worker), "log": worker.log.read_text()}
    finally:
        processes.end()


class Terminal(io.StringIO):
    """Stderr, which keeps what was written to it."""

    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        return super().write(text)


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    own_mounts()
    sys.stderr = said = Terminal()
    mount("-t", "tmpfs", "-o", "size=2m", "none", str(directory))
    mount("-t", "tmpfs", "-o", "size=1m", "none", str(SHARED))
    if what == "prints":
        return print(json.dumps(printed(directory)))
    log, shards = directory / "server.log", what == "full in shards"
    method, module = (in_shards(), "fairseq_async.server.programs.local_sgd_main") if shards else (METHOD, SGD_SERVER)
    server = ServerProcess(module, 2, directory, log, restarts=0)
    found: dict[str, Any] = {}
    try:
        worker = Client(LastingConnection(server.address, server.token, 0))
        worker.join(LAYOUT, method)
        worker.slot.zero_()
        worker.initialise(None)
        steps = {"local_steps": 1, "step_seconds": 0.01} if shards else {}
        statuses = [push(worker, 0, 0.5, **steps).status]
        trouble(what, directory, server)
        for number in range(1, 20):
            statuses.append(push(worker, number, 0.5, **steps).status)
            if what.startswith("full"):
                fill(directory)  # again: the writer of a snapshot gives back what it had
                time.sleep(0.05)  # for the attempt at the next snapshot
        if what.startswith("full") or what == "read-only":
            # On a busy machine the writer is behind, and on a quick one it has not tried yet.
            wait_until(lambda: NOT_WRITTEN in said.getvalue())
        if what == "no shared memory":
            found["joiner"] = refused(server)
        relieve(what, directory)
        statuses += [push(worker, number, 0.5, **steps).status for number in range(20, 40)]
        found |= {
            "version": worker.pull(lambda published: None),
            "statuses": sorted(set(statuses)),
            "running": server.poll() is None,
        }
        server.process.kill()
        found["snapshots"] = len(snapshot_versions(directory))
        lines = (directory / "events.jsonl").read_text().splitlines()
        found["sequences"] = [json.loads(line)["sequence"] for line in lines]
        found["log"] = log.read_text()
    finally:
        server.stop()
    print(json.dumps(found))


def trouble(what: str, directory: Path, server: ServerProcess) -> None:
    if what in ("full", "full in shards"):
        # The writer has nothing to do: a snapshot that was written now would remove another one, and so make room.
        wait_until(lambda: snapshot_versions(directory)[-1:] == [1])
        fill(directory)
    elif what == "read-only":
        # Made read-only before anybody can open a file through it, which would keep it writable; open files stay open.
        aside = directory.parent / "read-only"
        aside.mkdir()
        mount("--bind", str(directory), str(aside))
        mount("-o", "remount,bind,ro", str(aside))
        mount("--move", str(aside), str(directory))
    elif what == "no shared memory":
        fill(SHARED)
    else:
        assert what == "no memory"
        wait_until(lambda: snapshot_versions(directory)[-1:] == [1])  # it has had all that it usually needs
        used = 1024 * int(Path(f"/proc/{server.process.pid}/status").read_text().split("VmSize:")[1].split()[0])
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))


def relieve(what: str, directory: Path) -> None:
    if what == "read-only":
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # a file may be open
    for path in (directory / "filler", SHARED / "filler"):
        path.unlink(missing_ok=True)


def refused(server: ServerProcess) -> str:
    """What a worker is told that comes now."""
    try:
        Client(LastingConnection(server.address, server.token, 1)).join(LAYOUT, METHOD)
    except AsyncError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
