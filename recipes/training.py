"""Trains a fairseq model by one of five methods; the commands of the methods differ in nothing but the method."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path

import torch

from fairseq_async.options.addresses import free_port
from fairseq_async.records.snapshots import DIRECTORY as SNAPSHOTS
from recipes.steps import RecipeError, console_script, environment, run_in_front, write_whole
from recipes.translation import USER_DIR


class Method(str, Enum):
    """The training method: how the gradients of the workers are applied to the parameters."""

    SINGLE = "single"  # one plain process with the batch of all workers
    SYNC = "sync"  # fairseq's own data parallelism: every update waits for every worker
    ASYNC = "async"  # each gradient is one update
    PAPER = "paper"  # one update per as many gradients as there are workers (Aji & Heafield 2019)
    HYBRID = "hybrid"  # the default: workers in step wait for each other; others look ahead


@dataclass(frozen=True)
class Training:
    """A training run with Adam.

    `settings` are further flags of fairseq-train, without the dashes. `slowdown` says how many times slower each
    asynchronous worker is made, in the format of `fairseq-async launch --slowdown`; `compress` is the value of the flag
    `--compress`.
    """

    data: Path
    save_dir: Path
    method: Method
    workers: int
    max_tokens: int
    settings: Mapping[str, object]
    slowdown: str = field(default="", kw_only=True)
    compress: str = field(default="", kw_only=True)

    @property
    def log(self) -> Path:
        """fairseq's log; with several workers, that of worker 0."""
        return self.save_dir / "logs" / "worker-0.log"

    @property
    def events(self) -> Path:
        """The server's event log, with one line per update; only asynchronous runs have it."""
        return self.save_dir / "events.jsonl"

    def command(self) -> list[str]:
        """Return the fairseq-train command, without the flags in which synchronous ranks differ."""
        max_tokens = self.max_tokens * (self.workers if self.method is Method.SINGLE else 1)
        rim = {"user-dir": USER_DIR, "save-dir": self.save_dir, "log-format": "json", "log-interval": 50}
        settings = rim | {"max-tokens": max_tokens} | dict(self.settings) | self.optimizer()
        return [console_script("fairseq-train"), str(self.data), *flags(settings)]

    def optimizer(self) -> dict[str, object]:
        """Return the optimizer's flags: Adam, or for an asynchronous method Adam on the server."""
        if self.method in (Method.SINGLE, Method.SYNC):
            return {"optimizer": "adam"}
        ours: dict[str, object] = {"optimizer": "hybrid_async", "inner-optimizer": "adam"}
        if self.compress:
            ours["compress"] = self.compress
        if self.method is Method.HYBRID:
            return ours
        return ours | {"updates-per-step": self.workers if self.method is Method.PAPER else 1, "look-ahead": "off"}


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return the settings as words of a command line; True gives a flag without a value."""
    pairs = ([f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in settings.items())
    return [word for pair in pairs for word in pair]


def train(run: Training) -> dict:
    """Train, or resume an interrupted run from its last checkpoint; return tokens, updates and seconds."""
    summary = run.save_dir / "training.json"
    claim(run)
    if not summary.exists():
        (train_local if run.method in (Method.SINGLE, Method.SYNC) else train_asynchronous)(run)
        write_whole(summary, json.dumps(measure(run), indent=2))
    return json.loads(summary.read_text())


def claim(run: Training) -> None:
    """Record the run's command in `save_dir`; raise if checkpoints or snapshots of another command are there.

    This run would go on from those as from its own.
    """
    record, command = run.save_dir / "command.txt", shlex.join(run.command())
    other = record.exists() and record.read_text() != command
    states = [*run.save_dir.glob("checkpoint*.pt"), *run.save_dir.glob(f"{SNAPSHOTS}/version-*.pt")]
    if other and states:
        raise RecipeError(f"{run.save_dir} holds a run with other options ({record.name}): delete it or change --out")
    run.log.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, command)


def start(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Start `command`; a resumed run appends to its log."""
    with log.open("a", encoding="utf-8") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())


def train_local(run: Training) -> None:
    """Run plain fairseq-train: one process, or one per worker under fairseq's own data parallelism."""
    if run.method is Method.SYNC:
        devices, port = torch.cuda.device_count(), free_port()
        commands = [run.command() + flags(rank(r, run.workers, devices, port)) for r in range(run.workers)]
    else:
        commands = [run.command() + ["--distributed-world-size", "1"]]
    logs = [run.log.with_name(f"worker-{r}.log") for r in range(len(commands))]
    processes: list[subprocess.Popen] = []
    try:
        processes.extend(start(command, log) for command, log in zip(commands, logs, strict=True))
        wait(processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train_asynchronous(run: Training) -> None:
    """Run server and workers on this machine by `fairseq-async launch`, which shows progress and keeps the logs."""
    launch = [console_script("fairseq-async"), "launch", "--workers", str(run.workers)]
    slower = ["--slowdown", run.slowdown] if run.slowdown else []
    code = run_in_front([*launch, *slower, "--", *run.command()])
    if code == 128 + signal.SIGINT:  # or another polite signal
        raise SystemExit(code)  # the launcher has said what is kept and how to go on
    if code:
        raise RecipeError(f"training failed with exit code {code}: see {run.log.parent}")


def rank(index: int, workers: int, devices: int, port: int) -> dict[str, object]:
    """Return the flags of one rank. NCCL needs one GPU per rank; Gloo serves CPUs and ranks that share a GPU."""
    return {
        "distributed-world-size": workers,
        "distributed-rank": index,
        "device-id": index % max(devices, 1),
        "distributed-init-method": f"tcp://127.0.0.1:{port}",
        "distributed-no-spawn": True,
        "distributed-backend": "nccl" if devices >= workers else "gloo",
        "ddp-backend": "legacy_ddp",
    }


def wait(processes: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
    """Wait for all processes; raise as soon as one fails, because the others may wait for it for ever."""
    while True:
        codes = [process.poll() for process in processes]
        for code, log in zip(codes, logs, strict=True):
            if code and not done(logs[0]):
                raise RecipeError(f"training failed with exit code {code}: see {log}")
        if None not in codes:
            return
        time.sleep(0.2)


def done(log: Path) -> bool:
    """Return whether rank 0 has saved its last checkpoint; after that, exit codes mean nothing.

    Ranks exit after rank 0 has saved, and torch's Gloo threads sometimes abort a process that is about to exit.
    """
    return "done training" in log.read_text(encoding="utf-8")


def statistics(log: Path, name: str) -> Iterator[dict]:
    """Yield the JSON records that fairseq's logger `name` (train, train_inner or valid) has written."""
    for line in log.read_text(encoding="utf-8").splitlines():
        _, found, record = line.partition(f"| INFO | {name} | ")
        if found and record.startswith("{"):
            yield json.loads(record)


def measure(run: Training) -> dict:
    """Return the figures of a finished run, from its logs.

    They are target tokens, applied updates, seconds by fairseq's own clock (which counts on after a restart), and the
    last validation loss, which is in bits and with smoothed labels.
    """
    epochs, validations = list(statistics(run.log, "train")), list(statistics(run.log, "valid"))
    if not epochs:
        raise RecipeError(f"no epoch was finished: see {run.log}")
    return {
        "target_tokens": target_tokens(run, epochs),
        "updates": int(epochs[-1]["train_num_updates"]),
        "seconds": float(epochs[-1]["train_wall"]),
        "valid_loss": float(validations[-1]["valid_loss"]) if validations else None,
    }


def target_tokens(run: Training, epochs: Sequence[Mapping[str, str]]) -> int:
    """Return the target tokens of all workers' batches.

    In an asynchronous run they come from the server's events, because a worker logs only its own tokens.
    """
    if run.events.exists():
        events = map(json.loads, run.events.open(encoding="utf-8"))
        return round(sum(event["weight"] for event in events if event["status"] == "applied"))
    updates = [0, *(int(epoch["train_num_updates"]) for epoch in epochs)]
    steps = [after - before for before, after in pairwise(updates)]
    return round(sum(float(e["train_wpb"]) * n for e, n in zip(epochs, steps, strict=True)))
