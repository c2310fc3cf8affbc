"""Measures how soon real processes have new shares when one of two workers becomes four times slower in mid-run.

Each batch takes a fixed time, by sleep. The free rate, of workers that never wait, is of the seconds per batch in the
steps before the change, and for the slower worker of as many more seconds as it sleeps longer.
"""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.shares import after_five  # noqa: E402
from scripts.bench.shares_processes import MODEL, USER_DIR  # noqa: E402

BOUND = 0.95
WAITS: dict[str, dict[str, object]] = {"shares, barrier": {"barrier": True, "shares": "auto"}, "shares": {}}
Steps = list[tuple[float, int]]


def steps(job: Training) -> tuple[Steps, Steps]:
    """Returns seconds and batches of the steps before a worker becomes slower, and of those after it."""
    before: Steps = []
    after: Steps = []
    first = int(str(job.settings["slower-from"]))
    version, number, drawn, last, changed = 0, 0, 0, 0.0, False
    for event in map(jsonlib.loads, job.events.open()):
        number += event["micro_batches"]
        drawn += event["micro_batches"] if event["worker"] == 1 else 0
        if event["version_after"] > version:
            (after if changed else before).append((event["time"] - last, number))
            version, number, last, changed = event["version_after"], 0, event["time"], drawn >= first - 1
    return before[1:], after  # the first one is without a beginning


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench_slower"),
    unit: Annotated[float, typer.Option(help="Seconds a batch.")] = 0.5,
    micro_batches: Annotated[int, typer.Option(min=2, help="Batches of a worker in a step, on average.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training.")] = 180,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Print the rate of each step after the change; exit code 1 if the bound is broken."""
    report = Report(f"Shares: one of two workers becomes four times slower, {unit:g} s a batch, U = {micro_batches}")
    jobs.claim(out)
    binary, out = jobs.corpus(data, out), out / "shares"
    timed = {"user-dir": USER_DIR, "task": "timed_translation", "update-freq": micro_batches, "log-interval": 1}
    timed |= {"seconds-per-batch": f"{unit},{unit}", "slower-from": 5 * micro_batches + 1}
    settings = MODEL.settings() | jobs.TIMED | timed | {"seed": 1, "stop-time-hours": seconds / 3600}
    rows: list[dict[str, Any]] = []
    for name, waits in WAITS.items():
        job = Training(binary, out / name.replace(", ", "_"), Method.HYBRID, 2, MODEL.max_tokens, settings | waits)
        jobs.run(job)
        before, after = steps(job)
        batch = median(seconds / (number / 2) for seconds, number in before)
        free = 1 / batch + 1 / (batch + 3 * unit)
        rates = {str(at): number / seconds / free for at, (seconds, number) in enumerate(after[:10], 1)}
        late = after_five(after, micro_batches)
        reached = sum(number for _, number in late) / sum(seconds for seconds, _ in late) / free
        rows.append({"method": name, "seconds per batch": batch} | rates | {"after five steps": reached})
    report.table("rate of each step, of the free one", rows)
    for row in rows:
        report.bound(f"{row['method']}: rate after five steps, of the free one", row["after five steps"], BOUND, True)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
