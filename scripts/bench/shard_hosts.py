"""Measures how much sooner workers exchange when other machines hold shards of the server.

Everything runs on this host. The line of each machine, the server's and those of the hosts of shards, is a relay in a
thread that passes on so many bytes a second in each direction, those of all workers together. Behind a barrier, all
workers send a gradient and take the parameters at the same time. The parameters that arrive are checked.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_async.exchange.authentication import new_token, write_token  # noqa: E402
from fairseq_async.method.spec import MethodSpec, hybrid_spec  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from fairseq_async.options.config import HybridOptions, ServerOptions  # noqa: E402
from fairseq_async.protocol import Layout, Push  # noqa: E402
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, ParameterGroup  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

SERVER = "fairseq_async.server.programs.gradient_main"
HOSTS = (0, 1, 3)
TENSORS, WORKERS = 8, 4
_OUTSIDE = "127.0.0.2"  # an address at which workers send tensors over TCP
_CHUNK = 1 << 16


class Line:
    """A machine's line: relays every connection to a process of this host, at a rate for all of them together.

    Args:
        bytes_per_second: rate of each direction.
    """

    def __init__(self, target: str, bytes_per_second: float) -> None:
        self._target, self._rate = target, bytes_per_second
        self._listener = socket.create_server((_OUTSIDE, 0))
        self.address = f"{_OUTSIDE}:{self._listener.getsockname()[1]}"
        self._free_at = {True: 0.0, False: 0.0}  # by direction: when the line is free
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        while True:
            outside, _ = self._listener.accept()
            try:
                inside = socket.create_connection((host, int(port)))
            except OSError:
                outside.close()  # the process is not there yet
                continue
            for inwards, ends in ((True, (outside, inside)), (False, (inside, outside))):
                threading.Thread(target=self._relay, args=(*ends, inwards), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, inwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                time.sleep(self._wait(len(data), inwards))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, size: int, inwards: bool) -> float:
        """Returns the seconds until the line has passed on so many bytes."""
        with self._lock:
            now = time.monotonic()
            self._free_at[inwards] = max(now, self._free_at[inwards]) + size / self._rate
            return self._free_at[inwards] - now


def main(
    parameters: Annotated[int, typer.Option(help="Of the model.")] = 4_000_000,
    mbit: Annotated[float, typer.Option(help="Of each machine's line, in each direction.")] = 100.0,
    rounds: Annotated[int, typer.Option(help="Of each case, after the first.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
) -> None:
    """Measures rounds of four workers without hosts, with one and with three."""
    os.environ["PYTHONPATH"] = str(ROOT)
    report = Report("Shards of the server on other machines")
    found = [measure(count, parameters, mbit * 1e6 / 8, rounds) for count in HOSTS]
    rows = [{"hosts": n, "s": s, "times sooner": found[0] / s} for n, s in zip(HOSTS, found, strict=True)]
    report.table(f"a round of {WORKERS} workers, {parameters:,} parameters, lines of {mbit:g} Mbit/s", rows)
    report.end(json)


def measure(hosts: int, parameters: int, bytes_per_second: float, rounds: int) -> float:
    """Returns the median seconds of a round, without the first one."""
    token = new_token()
    layout = Layout.of([(f"t{number}", torch.zeros(parameters // TENSORS)) for number in range(TENSORS)])
    with tempfile.TemporaryDirectory() as out, ExitStack() as stack:
        write_token(Path(out) / "token", token)
        shards = [stack.enter_context(shard(Path(out))) for _ in range(hosts)]
        addresses = [Line(address, bytes_per_second).address for address in shards]
        server = ServerProcess(SERVER, WORKERS, Path(out), Path(out) / "server.log", token=token)
        stack.callback(server.stop)
        address = Line(server.address, bytes_per_second).address
        work = [(number, address, token, layout, spec(addresses), rounds) for number in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as threads:
            seconds = list(threads.map(lambda its: train(*its), work))
    return median(max(each) for each in list(zip(*seconds, strict=True))[1:])


def spec(hosts: list[str]) -> MethodSpec:
    """Returns the method: every worker waits for the others, and a step subtracts the mean gradient."""
    inner = OptimizerSpec("SGD", [ParameterGroup(list(range(TENSORS)), {"lr": 1.0})])
    server = ServerOptions(server_shards=",".join(hosts), snapshot_seconds=1e6)
    return hybrid_spec(HybridOptions(barrier=True), WORKERS, server, inner.to_json(), total_steps=0)


@contextmanager
def shard(directory: Path) -> Iterator[str]:
    """Runs a host; yields its address on this machine."""
    address = f"127.0.0.1:{free_port()}"
    line = [sys.executable, "-m", "fairseq_async", "shard", address, "--token-file", str(directory / "token")]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as process:
        try:
            yield address
        finally:
            process.kill()


def train(number: int, address: str, token: str, layout: Layout, spec: MethodSpec, rounds: int) -> list[float]:
    """Runs one worker; returns the seconds of each of its exchanges."""
    client = Client(LastingConnection(address, token, number, patience=60.0))
    if not client.join(layout, spec).initialised:
        client.slot.zero_()
        client.initialise(None)
    gradient, taken, seconds = torch.ones(layout.size), torch.empty(layout.size), []
    for turn in range(rounds + 1):
        began = time.perf_counter()
        client.push(lambda slot: slot.copy_(gradient), Push(turn, turn, 1.0, pulls=True))
        client.pull(taken.copy_, starts=True)
        seconds.append(time.perf_counter() - began)
        assert torch.equal(taken, -(turn + 1) * gradient)
    client.close()
    return seconds


if __name__ == "__main__":
    run_main(main)
