"""Runs an honest worker beside a hostile one: the honest worker's state must equal that of a run alone, to the bit.

The hostile worker knows the token. It sends wrong introductions, and valid sessions whose messages are changed one
after the other by the protocol's schema. Its updates are zeros or NaN; with ``--compress``, payloads of zeros and
spoilt ones. It attacks a server's process over sockets first, then a service without sockets, which is several times
as fast.

python scripts/fuzz_sessions.py --messages 100000 --direct 10000000
python scripts/fuzz_sessions.py --messages 20000 --direct 100000 --compress topk:chunk=8,keep=2,pull=int8
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.exchange.linux import end_with_parent  # noqa: E402
from fairseq_async.method.spec import MethodSpec  # noqa: E402
from fairseq_async.options.compression import parse  # noqa: E402
from fairseq_async.protocol import Push, Report  # noqa: E402
from fairseq_async.reporting.audit import audit  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report as Bench  # noqa: E402
from scripts.faults.adder import LAYOUT, adder_spec  # noqa: E402
from scripts.faults.digest import digest, read_snapshot  # noqa: E402
from scripts.faults.direct import DirectAttack  # noqa: E402
from scripts.faults.hostile import Attack, HostileWorker  # noqa: E402
from scripts.faults.sgd_server import build  # noqa: E402

SERVER = "scripts.faults.sgd_server"
_PAUSE = 0.02  # seconds between two updates of the honest worker
_LOOK_EVERY = 5.0  # seconds between two looks at the server's memory
_SHOWN = 40
_WARM_UP = 0.1  # share of the messages up to which memory may grow


@dataclass
class Honest:
    """Worker 0, the honest one; the values of its updates depend only on their number.

    Attributes:
        seconds: duration of each push.
    """

    client: Client
    spec: MethodSpec
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parameters = torch.zeros(LAYOUT.size)
        self.client.join(LAYOUT, self.spec)
        self.client.slot.zero_()
        self.client.initialise(None)
        self._version = self.client.pull(self._parameters.copy_, starts=True)

    def step(self) -> None:
        sequence = len(self.seconds)
        update = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(sequence))
        report = Report(epochs=0.25, loss=1.0, position={"batch": sequence})
        began = time.perf_counter()
        self.client.push(lambda slot: slot.copy_(update), Push(sequence, self._version, 1.0, report))
        self.seconds.append(time.perf_counter() - began)
        self._version = self.client.pull(self._parameters.copy_, starts=True)

    def state(self, directory: Path) -> str:
        """Returns the digest of the server's state of this worker, of the rule's state and of the parameters."""
        path = directory / "state.pt"
        self.client.save_state(str(path))
        state = read_snapshot(path)
        server = state["server"]
        own = [server["sequences"][0], server["refused"].get(0, 0), state["positions"][0]]
        return digest([server["parameters"], server["rule"], own])


def spec_of(compress: str) -> MethodSpec:
    """Returns the method of both workers."""
    return adder_spec(snapshot_seconds=2.0, compress=parse(compress).model_dump())


def go(run_dir: Path, messages: int, seed: int, compress: str = "none") -> tuple[Honest, str, Attack, list[int]]:
    """Runs the honest worker until the hostile one has sent its messages; returns states and the server's memory."""
    sizes: list[int] = []
    look_at, spec = 0.0, spec_of(compress)
    with served(run_dir) as server:
        honest = Honest(Client(LastingConnection(server.address, server.token, 0, 30.0)), spec)
        hostile = HostileWorker(server.address, server.token, spec, LAYOUT, random.Random(seed))
        attack = Attack(hostile, messages)
        try:
            while attack.poll():
                honest.step()
                time.sleep(_PAUSE)
                if time.monotonic() >= look_at and attack.sent >= _WARM_UP * messages:
                    sizes.append(_resident(server.process.pid))
                    look_at = time.monotonic() + _LOOK_EVERY
        finally:
            attack.end()
        return honest, honest.state(run_dir), attack, sizes


def alone(run_dir: Path, updates: int, compress: str = "none") -> str:
    """Returns the state of the honest worker after a run without the hostile one."""
    with served(run_dir) as server:
        honest = Honest(Client(LastingConnection(server.address, server.token, 0, 30.0)), spec_of(compress))
        for _ in range(updates):
            honest.step()
        return honest.state(run_dir)


@contextmanager
def served(run_dir: Path) -> Iterator[ServerProcess]:
    """Runs a server process until the end of the block."""
    server = ServerProcess(SERVER, 2, run_dir, run_dir / "server.log")
    try:
        yield server
    finally:
        server.stop()


class DirectResult(NamedTuple):
    """The result of one process of :func:`direct`.

    Attributes:
        sent: number of messages.
        kinds: number of kinds of answers.
        same: whether the honest worker's state equals that of its run alone.
        growth: bytes by which this process has grown.
        longest: seconds of the longest update of the honest worker.
    """

    sent: int
    kinds: int
    same: bool
    growth: int
    longest: float


def direct(directory: Path, messages: int, seed: int, compress: str) -> DirectResult:
    """Runs both workers without sockets, in this process, and the honest one again alone."""
    torch.set_num_threads(1)
    sys.stderr = open(directory / f"refusals-{seed}.log", "w")  # noqa: SIM115  # until this process ends
    spec = spec_of(compress)
    attack = DirectAttack(directory / f"both-{seed}", build, spec, LAYOUT, seed)
    size = 0
    while attack.sent < messages:
        for _ in range(10):
            attack.session(1000)
        attack.step()
        size = size or (_resident(os.getpid()) if attack.sent >= _WARM_UP * messages else 0)
    growth = _resident(os.getpid()) - size
    alone = DirectAttack(directory / f"alone-{seed}", build, spec, LAYOUT, seed)
    for _ in attack.seconds:
        alone.step()
    same = digest(attack.state()) == digest(alone.state())
    return DirectResult(attack.sent, len(attack.outcomes), same, growth, max(attack.seconds))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(
    messages: Annotated[int, typer.Option(min=1000, help="Over sockets.")] = 100_000,
    without: Annotated[int, typer.Option("--direct", min=0, help="Without sockets.")] = 1_000_000,
    processes: Annotated[int, typer.Option(min=1, help="For those without sockets.")] = 2,
    seed: Annotated[int | None, typer.Option(help="Of the hostile worker; another each time by default.")] = None,
    compress: Annotated[str, typer.Option(help="The run's codecs, as those of --compress in a run.")] = "none",
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print what the server answered, how long the honest worker's pushes took, and how much the server grew."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    report = Bench(f"{messages:,} messages of a hostile worker over sockets and {without:,} without, seed {seed}")
    try:
        spec_of(compress)
    except ValueError as error:
        fail(ConfigurationError(f"--compress: {error}"))
    over_sockets(report, messages, seed, compress)
    if without:
        without_sockets(report, without, processes, seed, compress)
    report.end(json_file)


def over_sockets(report: Bench, messages: int, seed: int, compress: str) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "both"
        honest, state, attack, sizes = go(run_dir, messages, seed, compress)
        seconds = time.monotonic() - began
        same = state == alone(Path(directory) / "alone", len(honest.seconds), compress)
        log = (run_dir / "server.log").stat().st_size
        found = audit(run_dir)
    common = attack.outcomes.most_common(_SHOWN)
    report.table("the most frequent answers", [{"answer": what, "count": count} for what, count in common])
    figures = {
        "messages": attack.sent,
        "messages a second": attack.sent / seconds,
        "kinds of answers": len(attack.outcomes),
        "updates of the honest worker": len(honest.seconds),
        "its pushes: median milliseconds": 1000 * median(honest.seconds),
        "its pushes: longest, milliseconds": 1000 * max(honest.seconds),
        "the server's log, kB": log / 1000,
        "updates in the audited log": found.applied,
    }
    report.table("figures", [{"figure": name, "value": value} for name, value in figures.items()])
    report.bound("messages", attack.sent, messages, at_least=True)
    report.bound("state as alone, to the bit", float(same), 1.0, at_least=True)
    report.bound("growth of the server, MiB", (sizes[-1] - sizes[0]) / 2**20, 5.0)
    report.bound("longest push of the honest worker, seconds", max(honest.seconds), 0.5)


def without_sockets(report: Bench, messages: int, processes: int, seed: int, compress: str) -> None:
    context, its_end = multiprocessing.get_context("spawn"), (signal.SIGKILL, os.getpid())
    pool = ProcessPoolExecutor(processes, context, end_with_parent, its_end)
    with tempfile.TemporaryDirectory() as directory, pool:
        each = math.ceil(messages / processes)
        runs = [pool.submit(direct, Path(directory), each, seed + number, compress) for number in range(processes)]
        found = [run.result() for run in runs]
    report.table("without sockets, each process", [result._asdict() for result in found])
    report.bound("messages without sockets", sum(result.sent for result in found), messages, at_least=True)
    report.bound("state as alone, to the bit", float(all(result.same for result in found)), 1.0, at_least=True)
    report.bound("growth of a process, MiB", max(result.growth for result in found) / 2**20, 5.0)
    report.bound("longest update of the honest worker, seconds", max(result.longest for result in found), 0.5)


if __name__ == "__main__":
    run_main(main)
