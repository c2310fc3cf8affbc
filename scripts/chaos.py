"""Injects many faults (a *storm*) into a run of a recipe, and compares it with a run without faults (a *calm* run).

Worker 0 shares memory with the server. Worker 1 is on another host: a network namespace, or another address of this
host without the rights to create namespaces. It uses TCP, through a proxy that delays, drops, doubles and corrupts its
messages, and disconnects it. Signals kill and stop processes. This program restarts dead workers, as
``fairseq-async launch`` does; the server is restarted from its last snapshot by the process that started it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_async import protocol  # noqa: E402
from fairseq_async.environment import SERVER, TOKEN, WORKER, WORKERS  # noqa: E402
from fairseq_async.errors import AsyncError, ConfigurationError, fail  # noqa: E402
from fairseq_async.exchange import copy  # noqa: E402
from fairseq_async.launch.command.command import SERVERS  # noqa: E402
from fairseq_async.method.spec import MethodSpec  # noqa: E402
from fairseq_async.protocol import Layout  # noqa: E402
from fairseq_async.reporting.audit import audit  # noqa: E402
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import environment, run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.faults import schedule  # noqa: E402
from scripts.faults.digest import digest  # noqa: E402
from scripts.faults.hostile import Attack, HostileWorker  # noqa: E402
from scripts.faults.hosts import LOOPBACK, Cable, Host, other_host  # noqa: E402
from scripts.faults.injector import Injector  # noqa: E402
from scripts.faults.proxy import Proxy  # noqa: E402
from scripts.faults.schedule import Fault, Schedule  # noqa: E402
from scripts.storm_figures import (  # noqa: E402
    Log,
    entrances,
    figures,
    gaps_after_kills,
    gaps_in_windows,
    loss_ratio,
    useful_share,
    waits,
)

COUNT = 2  # workers
_PROBE_EVERY = 20.0  # seconds between two comparisons of the server's parameters with a worker's
_START = 300.0  # seconds for all workers to send their first update
_LONGEST = 1_000_000  # updates: a run ends by time
_HOSTILE_TENSORS = 0.01  # share of the hostile worker's updates with a tensor, which is as large as the model
_HOSTILE_PAUSE = 0.1  # seconds before each of the hostile worker's batches: on few cores it would take the others' time
_LONGEST_END = 60.0  # seconds for which the end of a run is watched
_WORKER_TIMEOUT = 10  # seconds
_LONG = 20_000  # local steps of the learning rate's schedule: an hour's


class Recipe(str, Enum):
    MULTI30K = "multi30k"
    C4 = "c4"


@dataclass
class Job:
    """A recipe's run: the command of a worker, and the module of the server."""

    command: list[str]
    server: str
    run_dir: Path
    address_flag: bool  # whether the address is given by --server; otherwise by an environment variable
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class Timeline:
    """What happened when, in seconds since 1970."""

    moments: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, worker: int | None = None, **more: Any) -> None:
        self.moments.append({"time": time.time(), "what": what, "worker": worker} | more)


def multi30k(out: Path, data: Path | None) -> Job:
    preset = PRESETS[Size.SMALL]
    rim = {"disable-validation": True, "no-save": True, "log-interval": 50, "max-update": _LONGEST, "seed": 1}
    faults = {"snapshot-seconds": 5, "worker-timeout": _WORKER_TIMEOUT}
    training = Training(
        jobs.corpus(data, out.parent),
        out,
        Method.HYBRID,
        COUNT,
        preset.max_tokens,
        preset.settings() | rim | faults,
    )
    command = [*training.command(), "--distributed-world-size", "1"]
    return Job(command, SERVERS["hybrid_async"], out, address_flag=True)


def c4(out: Path, text: Path | None) -> Job:
    """Returns the job of the C4 recipe: local SGD with the tiny model."""
    recipe = jobs.ROOT / "recipes" / "c4_lm"
    if text is None:
        line = [sys.executable, str(recipe / "corpus_made_up.py"), str(out.parent / "text")]
        text = Path(subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip())
    config = json.loads((recipe / "demo.json").read_text())
    config["async_training"] |= {"run_dir": str(out), "snapshot_seconds": 5, "worker_timeout": _WORKER_TIMEOUT}
    (out.parent / "c4.json").write_text(json.dumps(config))
    command = [sys.executable, str(recipe / "train.py"), "--deepspeed", "--deepspeed_config", f"{out.parent}/c4.json"]
    command += ["--model", "tiny", "--vocab", "2000", "--data", str(text), "--out", str(out.parent / "c4"), "--resume"]
    command += ["--steps", str(_LONG)]
    return Job(command, SERVERS["local_sgd"], out, address_flag=False, variables={"DS_ACCELERATOR": "cpu"})


def storm(minutes: float, per_hour: float, seed: int) -> Schedule:
    """Returns faults at equal intervals, in an order that depends on the seed; kinds are as frequent as listed."""
    kinds: list[dict[str, Any]] = [
        {"kind": "kill", "target": 0},
        {"kind": "kill", "target": 1},
        {"kind": "kill", "target": "server"},
        {"kind": "pause", "target": 0, "seconds": 15},
        {"kind": "partition", "target": 1, "seconds": 30},
        {"kind": "kill", "target": 1},
        {"kind": "kill", "target": "server"},
        {"kind": "drop", "target": 1, "of": "request"},
        {"kind": "drop", "target": 1, "of": "reply"},
        {"kind": "duplicate", "target": 1},
        {"kind": "corrupt", "target": 1},
        {"kind": "delay", "target": 1, "of": "reply", "seconds": 2},
    ]
    random.Random(seed).shuffle(kinds)
    distance = 3600 / per_hour
    count = int((60 * minutes - distance / 2) / distance)
    return Schedule.of(Fault(**each, at=distance * (n + 0.5)) for n, each in enumerate(islice(cycle(kinds), count)))


class Run:
    """One run of a job, with worker 1 on the other host.

    Args:
        hostile: whether a hostile worker, which knows the token, joins.

    Attributes:
        timeline: starts, deaths and faults.
        probes: number of times that the server's parameters were compared with those of a worker that had just pulled.
        equal: number of these times at which they were equal.
        ended_after: seconds from the run's last step, with worker 1 stopped by a signal, to the end of server and
            worker 0; infinite if one of them was still there after ``_LONGEST_END``.
    """

    def __init__(self, job: Job, host: Host, hostile: bool = False) -> None:
        self.job, self.timeline, self.prefixes, self.hostile = job, Timeline(), [(), host.prefix], hostile
        self.attack: Attack | None = None
        self.equal = self.probes = 0
        self.ended_after = math.inf
        shutil.rmtree(job.run_dir, ignore_errors=True)
        self.logs = job.run_dir / "logs"
        self.logs.mkdir(parents=True)
        log = self.logs / "server.log"
        self.server = ServerProcess(job.server, COUNT, job.run_dir, log, restarts=10**6)
        self.proxy = Proxy(self.server.address, host.near)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._paused: set[int] = set()

    def go(self, seconds: float, faults: Schedule) -> None:
        """Runs for the given time, which starts when all workers have sent an update.

        Raises:
            AsyncError: the run did not start.
        """
        try:
            for worker in range(COUNT):
                self._start(worker)
            self._wait_for_all()
            if self.hostile:
                self.attack = self._attack()
            self.timeline.note("begin")
            injector = Injector(faults, self.proxy, self._send)
            end, probe_at = time.monotonic() + seconds, time.monotonic() + _PROBE_EVERY
            while time.monotonic() < end:
                self._poll(injector)
                if time.monotonic() > probe_at:
                    self._probe()
                    probe_at = time.monotonic() + _PROBE_EVERY
            self.timeline.note("end")
            self._finish()
        finally:
            self._end()

    def _attack(self) -> Attack:
        """Starts the hostile worker, which sends only NaN: the server would apply zeros as gradients like any other."""
        layout, spec = self._description()
        address, token = self.server.address, self.server.token
        rng = random.Random(1)
        hostile = HostileWorker(address, token, spec, layout, rng, worker=None, joins=True, only_nan=True)
        hostile.with_tensor, hostile.pause = _HOSTILE_TENSORS, _HOSTILE_PAUSE
        return Attack(hostile, sys.maxsize)

    def _description(self) -> tuple[Layout, MethodSpec]:
        description = json.loads((self.job.run_dir / "run.json").read_text())
        return Layout.from_json(description["layout"]), MethodSpec.from_json(description["method"])

    def _poll(self, injector: Injector) -> None:
        if self.attack:
            self.attack.poll()
        before = len(injector.happened)
        injector.poll()
        for _, fault in injector.happened[before:]:
            what = fault.model_dump(exclude_none=True, exclude={"at", "target"})
            worker = fault.target if isinstance(fault.target, int) else None
            self.timeline.note("fault", worker, **what)
            print(f"{fault.kind} {fault.target}", flush=True)
        for worker, process in list(self.workers.items()):
            if process.poll() is not None:
                self.timeline.note("death", worker, code=process.returncode)
                self._start(worker)
        time.sleep(0.02)

    def _send(self, target: int | str, number: signal.Signals) -> None:
        if number is signal.SIGCONT:
            self.timeline.note("wake", target if isinstance(target, int) else None)
        process = self.server.process if target == "server" else self.workers[int(target)]
        process.send_signal(number)

    def _start(self, worker: int) -> None:
        self.timeline.note("start", worker)
        address = self.proxy.address if worker else self.server.address
        variables = {WORKER: str(worker), WORKERS: str(COUNT), TOKEN: self.server.token} | self.job.variables
        if not self.job.address_flag:
            variables[SERVER] = address
        line = [*self.prefixes[worker], *self.job.command] + (["--server", address] if self.job.address_flag else [])
        with (self.logs / f"worker-{worker}.log").open("ab") as log:
            self.workers[worker] = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment() | variables
            )
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(self.workers[worker].pid, {cores[worker % len(cores)]})

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + _START
        while len({event["worker"] for event in read_lines(self.job.run_dir / "events.jsonl")}) < COUNT:
            if time.monotonic() > deadline or any(process.poll() for process in self.workers.values()):
                raise AsyncError(f"the run did not start: see {self.logs}")
            time.sleep(0.2)

    def _probe(self) -> None:
        """Joins as one more worker, and compares the published parameters with those that the server sends."""
        try:
            layout, spec = self._description()
            client = Client(LastingConnection(self.server.address, self.server.token, None))
            client.join(layout, spec)
            mine = torch.empty(layout.size)
            for _ in range(20):
                version = client.pull(lambda published: copy(mine, published))
                if client.connection.ask(protocol.Pull(), protocol.PullReply).version == version:
                    self.probes += 1
                    self.equal += digest(client.slot) == digest(mine)
                    break
            client.leave(finished=False)
        except AsyncError:
            pass  # the server was killed just now

    def _finish(self) -> None:
        """Ends the run while worker 1 is stopped by a signal, and waits for the end of server and worker 0."""
        self._send(0, signal.SIGCONT)  # worker 0 may be in a pause of the schedule
        self._send(1, signal.SIGSTOP)
        layout, spec = self._description()
        client = Client(LastingConnection(self.server.address, self.server.token, None, patience=_LONGEST_END))
        client.join(layout, spec)
        began = time.monotonic()
        client.leave(finished=True)
        while time.monotonic() < began + _LONGEST_END:
            if self.server.poll() is not None and self.workers[0].poll() is not None:
                self.ended_after = time.monotonic() - began
                return
            time.sleep(0.02)

    def _end(self) -> None:
        if self.attack:
            self.attack.end()
        for process in self.workers.values():
            process.kill()
            process.wait()
        self.server.stop()
        self.proxy.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a file of JSON lines."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            yield json.loads(line)


def judge(report: Report, name: str, quiet: Log, wild: Log) -> None:
    """Checks the bounds; omits those whose kind of fault did not occur."""
    report.bound(f"{name}: share of useful work", useful_share(wild), 0.95, at_least=True)
    report.bound(f"{name}: final loss beside that of the calm run", loss_ratio(quiet, wild), 1.01)
    if gaps := gaps_after_kills(wild):
        ratio = max(gaps) / max(gaps_in_windows(quiet))
        report.bound(f"{name}: survivors' longest gap after a kill beside the calm run's", ratio, 1.1)
    if resumed := waits(wild, wild.rollbacks):
        report.bound(f"{name}: longest time from the server's restart to an update, seconds", max(resumed), 5)
    if entered := entrances(wild):
        report.bound(f"{name}: longest time from a worker's start to its first update, seconds", max(entered), 15)


def main(
    recipe: Annotated[list[Recipe], typer.Option(help="May be repeated.")] = [Recipe.MULTI30K, Recipe.C4],  # noqa: B006
    minutes: Annotated[float, typer.Option(min=0.5, help="Of each run, the one without faults and the one with.")] = 30,
    calm_minutes: Annotated[float | None, typer.Option(min=0.5, help="Of the one without, if it is shorter.")] = None,
    faults_per_hour: Annotated[float, typer.Option(min=1)] = 150,
    seed: Annotated[int, typer.Option(help="Of the order of the faults.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Multi30k, binarised by its recipe; else a made-up pair.")] = None,
    text: Annotated[Path | None, typer.Option(help="Shards of C4, for its recipe; else a made-up text.")] = None,
    faults: Annotated[Path | None, typer.Option(help="A schedule in YAML, instead of the random faults.")] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="Worker 1 is on this host in any case.")] = False,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="One more worker of the storm sends what it should not.")
    ] = False,
    latency: Annotated[float, typer.Option(min=0, help="Milliseconds to worker 1's host.")] = 0,
    loss: Annotated[float, typer.Option(min=0, max=0.5, help="Share of packets lost between the hosts.")] = 0,
    mbit: Annotated[float | None, typer.Option(min=0.1, help="Mbit/s to worker 1's host.")] = None,
    out: Annotated[Path, typer.Option(help="For all files.")] = Path("runs/chaos"),
    json_file: Annotated[Path | None, typer.Option("--json", help="For what is printed.")] = None,
) -> None:
    """Print the cost of many faults in a run, and whether its logs prove that nothing was lost."""
    cable = Cable(latency / 1000, loss, mbit and mbit * 1e6 / 8)
    if loopback and not cable.good:
        fail(ConfigurationError("--loopback has no cable: leave out --latency, --loss and --mbit"))
    jobs.claim(out)
    report = Report(f"a storm of {faults_per_hour:g} faults an hour for {minutes:g} minutes")
    for each in recipe:
        given = schedule.read(faults) if faults else storm(minutes, faults_per_hour, seed)
        runs = {}
        for name, what in (("calm", Schedule(faults=())), ("storm", given)):
            directory = (out / each.value / name).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            job = multi30k(directory, data) if each is Recipe.MULTI30K else c4(directory, text)
            print(f"{each.value}: {name}", flush=True)
            try:
                with nullcontext(LOOPBACK) if loopback else other_host(cable) as host:
                    runs[name] = Run(job, host, hostile and name == "storm")
                    runs[name].go(60 * (minutes if name == "storm" else calm_minutes or minutes), what)
            except AsyncError as error:
                fail(error)
            (directory / "timeline.json").write_text(json.dumps(runs[name].timeline.moments, indent=0))
        (out / each.value / "schedule.yaml").write_text(yaml.safe_dump(given.model_dump(exclude_none=True)))
        quiet, wild = (Log(runs[name].job.run_dir) for name in ("calm", "storm"))
        found, last = audit(runs["storm"].job.run_dir), runs["storm"]
        rows = figures(quiet, wild) | {
            "parameters equal on server and a worker that has just pulled": f"{last.equal} of {last.probes}",
            "audit": f"{found.applied} applied, {sum(found.rolled_back.values())} rolled back, each counts once",
        }
        if last.attack:
            rows["the hostile worker's messages; kinds of answers"] = (
                f"{last.attack.sent:,}; {len(last.attack.outcomes)}"
            )
        report.table(each.value, [{"figure": key, "value": value} for key, value in rows.items()])
        judge(report, each.value, quiet, wild)
        report.bound(f"{each.value}: share of equal parameters", last.equal / max(1, last.probes), 1.0, at_least=True)
        most = _WORKER_TIMEOUT + 5
        report.bound(f"{each.value}: seconds to the end of a run in which a worker hangs", last.ended_after, most)
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
