"""A server and its workers on a disk that is full or read-only for a while; in a mount namespace of its own.

Arguments: what happens (``full``, ``full in shards``, ``read-only``, ``no shared memory``), and an empty directory. The
log is on this disk too, as a launcher's is. Prints JSON.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fairseq_async import methods
from fairseq_async.config import LocalSGDOptions, ServerOptions
from fairseq_async.errors import AsyncError
from fairseq_async.method_spec import MethodSpec, local_sgd_spec
from fairseq_async.server import Layout
from fairseq_async.server.process import ServerProcess
from fairseq_async.worker.client import Client
from scripts.faults.sgd_server import sgd_spec
from tests.helpers.run_files import snapshot_versions
from tests.helpers.server_client import SGD_SERVER, push
from tests.helpers.waiting import wait_until

SHARED = Path("/dev/shm")
LAYOUT = Layout.of([("weight", torch.zeros(25_000)), ("bias", torch.zeros(25_000))])  # 200 kB for each slot
METHOD = sgd_spec(snapshot_updates=1)


def in_shards() -> MethodSpec:
    options = ServerOptions(server_shards=2, snapshot_updates=1)
    return local_sgd_spec(methods.parse(LocalSGDOptions, {"local_steps": 1}, "test"), 2, [], options, {})


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


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    mount("-t", "tmpfs", "-o", "size=2m", "none", str(directory))
    mount("-t", "tmpfs", "-o", "size=1m", "none", str(SHARED))
    log, shards = directory / "server.log", what == "full in shards"
    method, module = (in_shards(), "fairseq_async.server.local_sgd_main") if shards else (METHOD, SGD_SERVER)
    server = ServerProcess(module, 2, directory, log, restarts=0)
    found: dict[str, Any] = {}
    try:
        worker = Client(server.address, server.token, 0)
        worker.join(LAYOUT, method)
        worker.slot.zero_()
        worker.initialise(None)
        steps = {"local_steps": 1, "step_seconds": 0.01} if shards else {}
        statuses = [push(worker, 0, 0.5, wait=True, **steps).status]
        trouble(what, directory, server)
        for number in range(1, 20):
            statuses.append(push(worker, number, 0.5, wait=True, **steps).status)
            if what.startswith("full"):
                fill(directory)  # again: the writer of a snapshot gives back what it had
        if what == "no shared memory":
            found["joiner"] = refused(server)
        relieve(what, directory)
        statuses += [push(worker, number, 0.5, wait=True, **steps).status for number in range(20, 40)]
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
        Client(server.address, server.token, 1).join(LAYOUT, METHOD)
    except AsyncError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
