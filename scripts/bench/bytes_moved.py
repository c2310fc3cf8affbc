"""Counts the bytes per token that runs of local SGD have moved, beside synchronous training with as many workers.

The runs' logs give the number of updates. With each update a worker sends as many fp32 numbers as the model has
parameters, and receives as many with the answer. A ring all-reduce, the least for a synchronous step, sends and
receives 2(k - 1)/k of that at each of k ranks.
"""

from __future__ import annotations

import json as jsonlib
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import RecipeError, run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402


def moved(run_dir: Path, tokens_per_step: int) -> dict[str, float]:
    """Returns the bytes per token of a run, and of the same local steps taken synchronously.

    Args:
        run_dir: directory with ``run.json`` and ``events.jsonl``.
        tokens_per_step: tokens of a local step of one worker; 0 if the events give the number of tokens.
    """
    run = jsonlib.loads((run_dir / "run.json").read_text())
    events = [jsonlib.loads(line) for line in (run_dir / "events.jsonl").open()]
    size, workers = 4 * sum(math.prod(shape) for _, shape, _ in run["layout"]), run["workers"]
    steps = sum(event["local_steps"] for event in events)
    tokens = steps * tokens_per_step or sum(event["tokens"] for event in events)
    if not tokens:
        raise RecipeError(f"{run_dir}: its events do not say how many tokens there were; give --tokens-per-step")
    return {
        "bytes per token": 2 * size * len(events) / tokens,
        "bytes per token, synchronous": 2 * size * 2 * (workers - 1) / workers * steps / tokens,
    }


def main(
    runs: Annotated[list[Path], typer.Argument(help="Directories with run.json and events.jsonl.", exists=True)],
    tokens_per_step: Annotated[int, typer.Option(min=0, help="Tokens of one worker's batch; 0: as logged.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the bytes that runs have moved with those of synchronous data parallelism."""
    report = Report("Bytes moved by local SGD, sent and received by all workers together")
    rows: list[dict[str, Any]] = []
    for run in runs:
        row = moved(run, tokens_per_step)
        ours, synchronous = row.values()
        rows.append({"run": str(run)} | row | {"synchronous over ours": synchronous / ours})
    report.table("runs", rows)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
