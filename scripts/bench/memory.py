"""Measures the memory that server and workers need, in copies of the parameters (fp32).

The server is real, with fairseq's Adam. Its memory counts as the difference to that with a quarter of the parameters,
so that what does not grow with the model drops out. A server in shards is compared with one process, both by their
processes' proportional shares of the pages that they use. The worker is fairseq-train with hybrid_async, compared with
plain fairseq-train of the same model on the same batches: the peak while it trains, and when it also saves a checkpoint
while gradients wait in the server's accumulator. Memory that a process shares with the others (parameters to read from,
slots) is counted at the server, and shown beside a worker's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.method.spec import JsonObject, hybrid_spec  # noqa: E402
from fairseq_async.options.config import HybridOptions, ServerOptions  # noqa: E402
from fairseq_async.protocol import Layout
from fairseq_async.worker.connection.client import Client  # noqa: E402
from fairseq_async.worker.connection.lasting_connection import LastingConnection  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes import training  # noqa: E402
from recipes.steps import RecipeError, run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import exchange_times, jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

COPIES_IN_SERVER = 5.0  # parameters, a copy to read from, accumulator, Adam's two moments
COPIES_TO_LOOK_AHEAD = 1.0  # the last step
COPIES_IN_WORKER = 1.0
SHARDS, IN_SHARDS = 2, 1.01  # bound of the memory of all shards, relative to that of one process
WORKERS = 2
UPDATES = 6
DEFAULT = HybridOptions()
WITHOUT_LOOK_AHEAD = DEFAULT.model_copy(update={"look_ahead": 0.0})
LR: JsonObject = {"lr": [1e-4]}
ADAM: JsonObject = {
    "_name": "adam",
    "adam_betas": "(0.9, 0.98)",
    "adam_eps": 1e-8,
    "weight_decay": 0.0,
    "use_old_adam": False,
}
FRAMEWORK: JsonObject = {
    "inner_optimizer": {**ADAM, "fp16_adam_stats": False, "tpu": False, **LR},
    "lr_scheduler": {"_name": "fixed", "force_anneal": None, "lr_shrink": 0.1, "warmup_updates": 0, **LR},
    "clip_norm": 1.0,
}
MODEL = {
    "arch": "transformer",
    "share-all-embeddings": True,
    **{f"{side}-layers": 3 for side in ("encoder", "decoder")},
    **{f"{side}-embed-dim": 512 for side in ("encoder", "decoder")},
    **{f"{side}-ffn-embed-dim": 2048 for side in ("encoder", "decoder")},
    **{f"{side}-attention-heads": 8 for side in ("encoder", "decoder")},
    "dropout": 0.1,
    "criterion": "label_smoothed_cross_entropy",
    "lr": 1e-4,
    "disable-validation": True,
    "num-workers": 0,
    "seed": 1,
}


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process: its own, those of files in /dev/shm, and the peak of both together so far."""

    own: int = 0
    shared: int = 0
    peak: int = 0

    @classmethod
    def of(cls, process: int) -> Memory:
        """Returns the present memory of a process; zeros if the process is gone."""
        get = sizes(process, "status").get
        return cls(get("RssAnon", 0) + get("RssFile", 0), get("RssShmem", 0), get("VmHWM", 0))

    @classmethod
    def of_all(cls, process: int) -> Memory:
        """Returns the present memory of a process and its children together, without the pages of libraries.

        A page that several of them have counts once; so does one that they share with this process.
        """
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        each = [sizes(number, "smaps_rollup") for number in (str(process), *children)]
        shared = sum(of.get("Pss_Shmem", 0) for of in [*each, sizes(os.getpid(), "smaps_rollup")])
        return cls(sum(of.get("Pss_Anon", 0) for of in each), shared)


def sizes(process: object, file: str) -> dict[str, int]:
    """Returns the sizes in a file under /proc of a process, in bytes; none if the process is gone."""
    try:
        lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return {name: 1024 * int(rest[0]) for name, rest in fields.items() if rest[-1:] == ["kB"]}


def watch(process: Popen[Any]) -> Memory:
    """Returns the maximum of each kind of memory over the rest of a process's life."""
    own = shared = peak = 0
    while process.poll() is None:
        now = Memory.of(process.pid)
        own, shared, peak = max(own, now.own), max(shared, now.shared), max(peak, now.peak)
        time.sleep(0.01)
    return Memory(own, shared, peak)


# The server


def hybrid_server(
    parameters: int,
    out: Path,
    options: HybridOptions = DEFAULT,
    shards: int = 1,
    memory: Callable[[int], Memory] = Memory.of,
) -> dict[str, Memory]:
    """Returns a server's memory after some updates, and after it has also written its state for a checkpoint."""
    spec = hybrid_spec(options, WORKERS, ServerOptions(server_shards=str(shards)), FRAMEWORK, total_steps=0)
    spec = replace(spec, grace_period=0.01)  # both workers are in one thread: none pushes while the other waits
    process = ServerProcess("fairseq_async.launch.fairseq_server", WORKERS, out, out / "server.log")
    try:
        clients = [Client(LastingConnection(process.address, process.token, number)) for number in range(WORKERS)]
        workers = [exchange_times.join(client, parameters, spec) for client in clients]
        for _ in range(UPDATES):
            for each in workers:
                each.multiply_grads(1.0)
                each.step()
        updated = memory(process.process.pid)
        clients[0].save_state(str(out.resolve() / "state.pt"))
        saved = memory(process.process.pid)
        for each in workers:
            each.worker.client.leave(finished=True)
    finally:
        process.stop()
    return {"after updates": updated, "after a checkpoint": saved}


def server_rows(parameters: int, out: Path, server: Callable[[int, Path], dict[str, Memory]]) -> list[dict[str, Any]]:
    """Returns a server's memory beyond that with a quarter of the parameters, in copies of the further parameters."""
    small, large = (Layout.of(exchange_times.model(count)).size for count in (parameters // 4, parameters))
    less, more = server(small, out / "quarter"), server(large, out / "whole")
    unit = 4 * (large - small)
    return [
        {
            "server": phase,
            "parameters MB": 4 * large / 1e6,
            "MB": (more[phase].own + more[phase].shared) / 1e6,
            "own copies": (more[phase].own - less[phase].own) / unit,
            "shared copies": (more[phase].shared - less[phase].shared) / unit,
            "copies at the peak": (more[phase].peak - less[phase].peak) / unit,
        }
        for phase in more
    ]


def shard_rows(parameters: int, out: Path) -> list[dict[str, Any]]:
    """Compares one process with shards: copies in all processes, and megabytes that do not grow with the model."""
    rows = []
    for shards in (1, SHARDS):
        server = partial(hybrid_server, shards=shards, memory=Memory.of_all)
        row = server_rows(parameters, out / f"shards-{shards}", server)[0]
        copies = row["own copies"] + row["shared copies"]
        rest = row["MB"] - copies * row["parameters MB"]
        rows.append({"shards": shards, "MB": row["MB"], "copies": copies, "MB beside them": rest})
    return rows


# The worker


@dataclass(frozen=True)
class Job(Training):
    """A run of one worker, whose server steps every `updates_per_step` gradients."""

    updates_per_step: int = 1

    def optimizer(self) -> dict[str, object]:
        steps = {"updates-per-step": self.updates_per_step} if self.method is Method.HYBRID else {}
        return super().optimizer() | steps


def train(job: Job) -> Memory:
    """Trains; returns the peak memory of the worker's process. hybrid_async starts its own server."""
    jobs.fresh(job)
    process = training.start(job.command() + ["--distributed-world-size", "1"], job.log)
    try:
        memory = watch(process)
    finally:
        process.kill()
    if process.returncode:
        raise RecipeError(f"training failed with exit code {process.returncode}: see {job.log}")
    return memory


def worker_row(
    phase: str, binary: Path, out: Path, updates_per_step: int, settings: dict[str, object]
) -> dict[str, Any]:
    """Measures both sides of one comparison."""
    plain_job, hybrid_job = (
        Job(binary, out / f"{method.value}-{updates_per_step}", method, 1, 1024, MODEL | settings, updates_per_step)
        for method in (Method.SINGLE, Method.HYBRID)
    )
    plain, hybrid = train(plain_job), train(hybrid_job)
    unit = 4 * jobs.parameters(hybrid_job)
    return {
        "worker": phase,
        "parameters MB": unit / 1e6,
        "plain MB": plain.own / 1e6,
        "hybrid own MB": hybrid.own / 1e6,
        "hybrid shared MB": hybrid.shared / 1e6,
        "copies more": (hybrid.own - plain.own) / unit,
        "with what it shares": (hybrid.peak - plain.peak) / unit,
    }


def worker_rows(binary: Path, out: Path) -> list[dict[str, Any]]:
    """Compares without a checkpoint, and with one while gradients wait in the server.

    Gradients wait because 7 batches are no multiple of 4.
    """
    saving: dict[str, object] = {"train-subset": "valid", "max-epoch": 1, "no-epoch-checkpoints": True}
    return [
        worker_row("training", binary, out, 1, {"max-update": UPDATES, "no-save": True}),
        worker_row("training, and a checkpoint", binary, out, 4, saving),
    ]


def main(
    out: Annotated[Path, typer.Option(help="For corpus, checkpoints and logs.")] = Path("runs/bench"),
    parameters: Annotated[int, typer.Option(min=1, help="Size of the server's model.")] = 25_000_000,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure the memory of server and worker; exit code 1 if a bound is broken."""
    report = Report(f"Memory: {WORKERS} workers, Adam, in copies of the fp32 parameters")
    jobs.claim(out)
    plain = server_rows(parameters, out / "memory", partial(hybrid_server, options=WITHOUT_LOOK_AHEAD))
    report.table(f"server without look-ahead, {parameters:,} parameters", plain)
    servers = server_rows(parameters, out / "memory", hybrid_server)
    report.table(f"server, {parameters:,} parameters", servers)
    shards = shard_rows(parameters, out / "memory")
    report.table("server in shards, after updates", shards)
    workers = worker_rows(jobs.corpus(None, out), out / "memory")
    report.table("worker, peak of the process", workers)
    most, ahead = (max(round(row["own copies"] + row["shared copies"], 2) for row in rows) for rows in (plain, servers))
    report.bound(f"server without look-ahead, with {WORKERS} slots", most, COPIES_IN_SERVER + WORKERS)
    report.bound(f"server, with {WORKERS} slots", ahead, COPIES_IN_SERVER + COPIES_TO_LOOK_AHEAD + WORKERS)
    report.bound(f"{SHARDS} shards, copies of one process's", shards[1]["copies"] / shards[0]["copies"], IN_SHARDS)
    report.bound("worker, copies more than plain", max(row["copies more"] for row in workers), COPIES_IN_WORKER)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
