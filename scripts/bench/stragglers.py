"""Measures target tokens per second with a slow worker: hybrid (by default and as in the paper) and synchronous.

All sides are slowed down in the same way: a slow worker sleeps after each gradient for as long as its factor requires.
The synchronous run (fairseq's legacy_ddp over Gloo) waits for it at every update; the hybrid runs do not.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.multi30k_en_de.presets import PRESETS, Size  # noqa: E402
from recipes.steps import RecipeError, run_main  # noqa: E402
from recipes.training import Method, Training, statistics  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

USER_DIR = Path(__file__).resolve().parent / "slow_rank"
OF_PAPER, IN_STEP = 0.95, 0.1  # equal workers: speed beside the paper's hybrid, and mean staleness
SHARE = 0.88  # share of the possible speedup: 2.2 of 2.5 with two workers, one of them four times slower


def parse(slowdown: str) -> list[float]:
    """Returns the factors of ``--slowdown``."""
    try:
        factors = [float(part) for part in slowdown.split(",")]
    except ValueError:
        factors = []
    if len(factors) < 2 or min(factors) < 1:
        raise RecipeError(f"--slowdown {slowdown}: two or more numbers from 1 up with commas between them, as in 1,4")
    return factors


def limit(factors: Sequence[float]) -> float:
    """Returns the ideal speedup: every worker at its own speed, over all of them at the slowest one's."""
    return sum(1 / factor for factor in factors) / (len(factors) / max(factors))


def synchronous(job: Training, skip: float) -> dict[str, float]:
    """Returns the target tokens per second of all ranks together, by fairseq's own meter."""
    jobs.run(job)
    tokens = seconds = 0.0
    updates = 0
    for record in statistics(job.log, "train_inner"):
        last, updates = updates, int(record["num_updates"])
        if float(record["wall"]) > skip:
            tokens += (updates - last) * float(record["wpb"])
            seconds += (updates - last) * float(record["wpb"]) / float(record["wps"])
    if not seconds:
        raise RecipeError(f"the synchronous run ended before its steady state: raise --seconds (log: {job.log})")
    return {"all": tokens / seconds}


def hybrid(job: Training, slowdown: str, skip: float) -> dict[str, float]:
    """Returns the target tokens per second of all workers and of each, from the server's events, and the staleness."""
    jobs.run(job, ["--slowdown", slowdown])
    events = [jsonlib.loads(line) for line in job.events.open()]
    steady = [event for event in events if event["time"] > events[0]["time"] + skip]
    if len(steady) < 2:
        raise RecipeError(f"the hybrid run ended before its steady state: raise --seconds (log: {job.log})")
    seconds = steady[-1]["time"] - steady[0]["time"]
    speeds = {
        f"worker {w}": sum(e["weight"] for e in steady[1:] if e["worker"] == w and e["status"] == "applied") / seconds
        for w in range(job.workers)
    }
    staleness = fmean(event["staleness"] for event in steady)
    return {"all": sum(speeds.values()), "staleness": staleness} | speeds


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench"),
    size: Annotated[Size, typer.Option(help="The Multi30k recipe's model.")] = Size.BASE,
    slowdown: Annotated[str, typer.Option(help="A factor for each worker.")] = "1,4",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training on each side.")] = 120,
    skip: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that are not counted.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side runs, in turn.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the speed of hybrid and synchronous training with a slow worker; exit code 1 if the bound is broken."""
    factors = parse(slowdown)
    report = Report(
        f"Stragglers: target tokens/s, --slowdown {slowdown}, {size.value} model on {data or 'a made-up pair'}"
    )
    jobs.claim(out)
    binary, preset, out = jobs.corpus(data, out), PRESETS[size], out / "stragglers"
    settings = preset.settings() | jobs.TIMED | {"seed": 1, "stop-time-hours": seconds / 3600}
    slow = {"user-dir": USER_DIR, "task": "slow_translation", "slowdown": slowdown}
    ranks = Training(binary, out / "sync", Method.SYNC, len(factors), preset.max_tokens, settings | slow)
    rows: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        waiting = synchronous(ranks, skip)["all"]
        paper, default = (
            hybrid(Training(binary, out / m.value, m, len(factors), preset.max_tokens, settings), slowdown, skip)
            for m in (Method.PAPER, Method.HYBRID)
        )
        workers = {f"of {name}": speed for name, speed in default.items() if name.startswith("worker")}
        row = {"round": number, "synchronous": waiting, "paper": paper["all"], "hybrid": default["all"]} | workers
        ratios = {"ratio": default["all"] / waiting, "of paper": default["all"] / paper["all"]}
        rows.append(row | ratios | {"staleness": default["staleness"], "paper's": paper["staleness"]})
    report.table("target tokens/s", rows)
    middle = {name: median(row[name] for row in rows) for name in ("ratio", "of paper", "staleness")}
    most = limit(factors)
    report.bound(f"hybrid over synchronous (limit {most:.3g})", middle["ratio"], SHARE * most, at_least=True)
    if min(factors) == max(factors):
        report.bound("hybrid over the paper's", middle["of paper"], OF_PAPER, at_least=True)
        report.bound("mean staleness", middle["staleness"], IN_STEP)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
