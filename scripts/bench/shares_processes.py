"""Measures target tokens per second of real processes that accumulate, with shares by speed and synchronous.

Each batch takes a worker a fixed time, by sleep, beside which its computing is small: so the machine's cores do not
decide. The synchronous run is fairseq's legacy_ddp over Gloo; the other is the default of hybrid_async.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.multi30k_en_de.presets import Preset  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.stragglers import hybrid, parse, synchronous  # noqa: E402

USER_DIR = Path(__file__).resolve().parent / "slow_batches"
BOUNDS = {"1,3": 1.85, "1,1,2,4": 2.3}
MODEL = Preset(layers=1, dim=32, ffn=64, dropout=0.1, max_tokens=256)


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench"),
    speeds: Annotated[str, typer.Option(help="A factor for each worker.")] = "1,3",
    unit: Annotated[float, typer.Option(help="Seconds a batch, for a worker of factor 1.")] = 1.0,
    micro_batches: Annotated[int, typer.Option(min=2, help="Batches of a worker in a step, on average.")] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training on each side.")] = 110,
    skip: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that are not counted.")] = 52,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the speed of shares by speed and of synchronous training; exit code 1 if the bound is broken."""
    factors = parse(speeds)
    report = Report(f"Shares: target tokens/s, {speeds} times {unit:g} s a batch, U = {micro_batches}")
    jobs.claim(out)
    binary, out = jobs.corpus(data, out), out / "shares"
    timed = {"user-dir": USER_DIR, "task": "timed_translation", "update-freq": micro_batches, "log-interval": 1}
    timed["seconds-per-batch"] = ",".join(f"{factor * unit:g}" for factor in factors)
    settings = MODEL.settings() | jobs.TIMED | timed | {"seed": 1, "stop-time-hours": seconds / 3600}
    ranks, ours = (
        Training(binary, out / method.value, method, len(factors), MODEL.max_tokens, settings)
        for method in (Method.SYNC, Method.HYBRID)
    )
    waiting, shared = synchronous(ranks, skip)["all"], hybrid(ours, ",".join("1" for _ in factors), skip)
    ratio = shared["all"] / waiting
    workers = {name: speed for name, speed in shared.items() if name.startswith("worker")}
    row = {"synchronous": waiting, "shares": shared["all"], "ratio": ratio, "staleness": shared["staleness"]}
    report.table("target tokens/s", [row | workers])
    if speeds in BOUNDS:
        report.bound(f"{speeds}: shares over synchronous", ratio, BOUNDS[speeds], at_least=True)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
