"""Measures the cost of a worker's exchange with the server.

The first comparison is its share of a worker's step in the Multi30k recipe, beside the optimizer's step of a plain run:
a push ends with the server's receipt, so every N-th push includes the inner optimizer's step, which a plain run makes
too. The second is for 25 million parameters and next to no optimizer, beside one Gloo all-reduce of the same bytes.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import RecipeError, run_main  # noqa: E402
from recipes.training import Method, Training, statistics  # noqa: E402
from scripts.bench import exchange_times, jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

STEP_TIMER = Path(__file__).resolve().parent / "step_timer"
SHARE_OF_STEP = 0.05
SHARE_OF_ALL_REDUCE = 1 / 3


def plain(job: Training, skip: float) -> dict[str, Any]:
    """Returns the milliseconds of a step of one fairseq process, and of Adam in it."""
    jobs.run(job)
    updates, seconds, optimizer = 0, 0.0, []
    last = 0
    for record in statistics(job.log, "train_inner"):
        interval, last = int(record["num_updates"]) - last, int(record["num_updates"])
        if float(record["wall"]) > skip:
            updates += interval
            seconds += interval * float(record["wpb"]) / float(record["wps"])
            optimizer.append(float(record["optimizer_ms"]))
    if not updates:
        raise RecipeError(f"the plain run ended before its steady state: raise --seconds (log: {job.log})")
    step = 1000 * seconds / updates
    return {
        "run": "plain fairseq, one process",
        "updates": updates,
        "step ms": step,
        "optimizer ms": mean(optimizer),
        "push ms": None,
        "push that steps ms": None,
        "pull ms": None,
        "share": mean(optimizer) / step,
    }


def exchanges(events: list[dict[str, Any]]) -> Iterator[tuple[float, float, bool, float]]:
    """Yields, for each update of a worker, the seconds to its next one, of its push and pull, and whether it stepped.

    An event carries what the worker measured at its event before.
    """
    version = events[0]["version_after"]
    before: dict[int, tuple[dict[str, Any], bool]] = {}
    for event in events[1:]:
        stepped, version = event["version_after"] > version, event["version_after"]
        if event["worker"] in before:
            previous, previous_stepped = before[event["worker"]]
            between = event["time"] - previous["time"]
            yield between, event["push_seconds"], previous_stepped, event["pull_seconds"]
        before[event["worker"]] = event, stepped


def hybrid(job: Training, skip: float) -> dict[str, Any]:
    """Returns the milliseconds of a step, a push and a pull of two workers, and the exchange's share of a step."""
    jobs.run(job)
    events = [jsonlib.loads(line) for line in job.events.open()]
    counted = [event for event in events if event["time"] > events[0]["time"] + skip]
    steady = list(exchanges(counted)) if counted else []
    if not any(stepped for _, _, stepped, _ in steady) or all(stepped for _, _, stepped, _ in steady):
        raise RecipeError(f"the hybrid run ended before its steady state: raise --seconds (log: {job.log})")
    step = mean(between for between, *_ in steady)
    return {
        "run": f"hybrid, {job.workers} workers",
        "updates": len(steady),
        "step ms": 1000 * step,
        "optimizer ms": None,
        "push ms": 1000 * mean(push for _, push, stepped, _ in steady if not stepped),
        "push that steps ms": 1000 * mean(push for _, push, stepped, _ in steady if stepped),
        "pull ms": 1000 * mean(pull for *_, pull in steady),
        "share": mean(push + pull for _, push, _, pull in steady) / step,
    }


def share_of_step(report: Report, binary: Path, out: Path, size: Size, seconds: float, skip: float) -> None:
    """Makes the first comparison: the exchange as a share of a step."""
    preset = PRESETS[size]
    settings = preset.settings() | jobs.TIMED | {"seed": 1, "stop-time-hours": seconds / 3600}
    single = Training(binary, out / "plain", Method.SINGLE, 1, preset.max_tokens, settings | {"user-dir": STEP_TIMER})
    # By default a push also waits for the other worker; that time is not part of the exchange.
    pair = Training(binary, out / "hybrid", Method.PAPER, 2, preset.max_tokens, settings)
    rows = [plain(single, skip), hybrid(pair, skip)]
    report.table("means of one step: optimizer, or push and pull, and their share of it", rows)
    optimizer = rows[0]["optimizer ms"] / pair.workers / rows[1]["step ms"]
    shares = {
        "push and pull": rows[1]["share"],
        "less the optimizer's steps, as long as plain": rows[1]["share"] - optimizer,
    }
    report.table("share of a step", [{"what": name, "share": value} for name, value in shares.items()])
    report.bound("push and pull, share of a step", rows[1]["share"], SHARE_OF_STEP)


def share_of_all_reduce(report: Report, out: Path, parameters: int, rounds: int) -> None:
    """Makes the second comparison: the exchange as a share of an all-reduce."""
    whole = exchange_times.whole(parameters, rounds, out)
    rows = exchange_times.rows(whole)
    times = {row["what"]: row["median ms"] for row in rows}
    share = (times["push"] + times["pull"]) / times["all-reduce"]
    share_with_step = (times["push that steps"] + times["pull"]) / times["all-reduce"]
    report.table(f"two processes, {parameters:,} fp32 parameters, in turn", rows)
    report.table("the parts, each alone in one process", exchange_times.rows(exchange_times.parts(parameters, rounds)))
    sums = {"push and pull": share, "push that steps, and pull": share_with_step}
    report.table("share of an all-reduce", [{"what": name, "share": value} for name, value in sums.items()])
    report.bound("push and pull, share of an all-reduce", share, SHARE_OF_ALL_REDUCE)


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench"),
    size: Annotated[Size, typer.Option(help="The Multi30k recipe's model.")] = Size.BASE,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of training on each side; 0 leaves this out.")] = 90,
    skip: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that are not counted.")] = 20,
    parameters: Annotated[int, typer.Option(min=1, help="Size of the model that is exchanged.")] = 25_000_000,
    rounds: Annotated[int, typer.Option(min=0, help="All-reduces, pushes and pulls; 0 leaves this out.")] = 60,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure push and pull against a step and against an all-reduce; exit code 1 if a bound is broken."""
    torch.set_num_threads(1)
    report = Report(f"Overhead: push and pull, {size.value} model on {data or 'a made-up pair'}")
    jobs.claim(out)
    if seconds:
        share_of_step(report, jobs.corpus(data, out), out / "overhead", size, seconds, skip)
    if rounds:
        share_of_all_reduce(report, out / "overhead" / "exchange", parameters, rounds)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
