"""Measures what a worker of two ranks costs: its exchange beside that of a worker of one rank, and its memory in bf16.

Plain PyTorch with HybridAsync and Adam, real processes on this machine. The runs of one and of two ranks take turns.
A worker's memory counts as the difference to that with a quarter of the parameters, so that what does not grow with
the model drops out. Gradients are in bf16 as the parameters are, and the optimizer's moments are the server's.
"""

from __future__ import annotations

import json as json_
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import console_script, environment, run_main  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

WARM_UP = 3  # first exchanges of a run, which do not count
STEPS = 15
RATIO = 1.1  # bound of an exchange of two ranks, relative to that of one
OWN, SHARED = 4.0, 4.0  # bounds in bytes a parameter: parameters and gradients of two bytes; one flat buffer in fp32
LAYER = 1024 * 1024


def run(out: Path, ranks: int, layers: int, dtype: str) -> dict[str, Any]:
    """Returns the seconds of each exchange, and the memory of rank 0 in bytes, of a run of one worker."""
    subprocess.run(["rm", "-rf", str(out)], check=True)
    out.mkdir(parents=True)
    launcher = [console_script("fairseq-async"), "launch", "--workers", "1", "--ranks-per-worker", str(ranks), "--"]
    job = [sys.executable, str(jobs.ROOT / "scripts/bench/islands_worker.py"), str(out), str(layers), dtype, str(STEPS)]
    path = {"PYTHONPATH": f"{jobs.ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (out / "log").open("w") as log:
        subprocess.run([*launcher, *job], stdout=log, stderr=log, env=environment() | path, check=True, timeout=600)
    events = [json_.loads(line) for line in (out / "events.jsonl").open()]
    counted = events[WARM_UP + 1 :]  # an event has the seconds of the exchange before
    seconds = {name: [event[f"{name}_seconds"] for event in counted] for name in ("push", "pull")}
    return {"seconds": seconds, "memory": json_.loads((out / "memory.json").read_text())}


def exchange_rows(out: Path, layers: int, turns: int) -> list[dict[str, Any]]:
    """Compares the exchanges of one rank and of two, which take turns."""
    found: dict[int, dict[str, list[float]]] = {ranks: {"push": [], "pull": []} for ranks in (1, 2)}
    for _ in range(turns):
        for ranks, lists in found.items():
            for name, values in run(out, ranks, layers, "float32")["seconds"].items():
                lists[name] += values
    rows = []
    for ranks, lists in found.items():
        both = [push + pull for push, pull in zip(lists["push"], lists["pull"], strict=True)]
        halves = {f"{name} ms": 1000 * median(values) for name, values in lists.items()}
        rows.append({"ranks": ranks, **halves, "exchange ms": 1000 * median(both), "exchanges": len(both)})
    return rows


def memory_rows(out: Path, layers: int) -> list[dict[str, Any]]:
    """Returns the bytes a parameter of rank 0 of a worker in bf16: of its own, and of memory that others share."""
    rows = []
    for ranks in (1, 2):
        less, more = (run(out, ranks, count, "bfloat16")["memory"] for count in (layers // 4, layers))
        parameters = LAYER * (layers - layers // 4)
        each = {name: (more[name] - less[name]) / parameters for name in ("own", "shared", "peak")}
        rows.append({"ranks": ranks, **{f"{name}, bytes a parameter": value for name, value in each.items()}})
    return rows


def main(
    out: Annotated[Path, typer.Option(help="For logs.")] = Path("runs/bench"),
    layers: Annotated[
        int, typer.Option(min=4, help="Matrices of 1024 x 1024; a quarter of them for the exchange.")
    ] = 60,
    turns: Annotated[int, typer.Option(min=1, help="Runs of each kind whose exchanges are timed.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure exchange and memory of a worker of two ranks; exit code 1 if a bound is broken."""
    report = Report("Islands: one worker, Adam")
    jobs.claim(out)
    exchanges = exchange_rows(out / "islands", layers // 4, turns)
    report.table(f"exchange of {layers // 4 * LAYER:,} parameters, medians", exchanges)
    memory = memory_rows(out / "islands", layers)
    report.table(f"rank 0 of a worker in bf16 of {layers * LAYER:,} parameters, after the last step", memory)
    report.bound("exchange of two ranks, of one", exchanges[1]["exchange ms"] / exchanges[0]["exchange ms"], RATIO)
    for name, limit in (("own", OWN), ("shared", SHARED)):
        report.bound(f"{name} bytes a parameter", max(row[f"{name}, bytes a parameter"] for row in memory), limit)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
