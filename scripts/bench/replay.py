"""Repeats real runs of four fairseq workers in one process, and checks that every checksum agrees."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.replay.replay import Recording, Replay, quiet  # noqa: E402
from recipes.made_up_pair.run import SETTINGS  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

UNEQUAL = ["--slowdown", "1,1,2,4"]
METHODS: dict[str, dict[str, object]] = {
    "hybrid": {"optimizer": "hybrid_async", "inner-optimizer": "adam"},
    "N = 4": {"optimizer": "hybrid_async", "inner-optimizer": "adam", "updates-per-step": 4, "look-ahead": "off"},
    "DN + DyLU": {"optimizer": "local_sgd", "local-steps": 4, "dynamic-local-steps": True, "grace-period": 0.05},
}


class Recorded(Training):
    """A run whose method is among its settings."""

    def optimizer(self) -> dict[str, object]:
        return {}


def main(
    out: Annotated[Path, typer.Option(help="For corpus, runs and logs.")] = Path("runs/bench"),
    workers: Annotated[int, typer.Option(min=1)] = 4,
    updates: Annotated[int, typer.Option(min=1, help="Of hybrid; mean local steps of local SGD.")] = 200,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Record and replay each method; exit code 1 if an update differs."""
    warnings.simplefilter("ignore")
    report = Report(f"Replay: {workers} workers, {UNEQUAL[1]} times slower, the demo's model, {updates} updates")
    jobs.claim(out)
    binary, rows = jobs.corpus(None, out), list[dict[str, Any]]()
    for name, method in METHODS.items():
        settings = SETTINGS | jobs.TIMED | method | {"max-update": updates, "record": True, "max-epoch": 0}
        job = Recorded(binary, out / "replay" / name.split()[0].lower(), Method.HYBRID, workers, 512, settings)
        began = time.monotonic()
        jobs.run(job, UNEQUAL)
        ran, recording = time.monotonic(), Recording.read(job.save_dir.resolve())
        rows.append({"method": name, "seconds of the run": ran - began} | replay(recording))
    report.table("replays", rows)
    for row in rows:
        report.bound(f"{row['method']}: share of the versions found equal", row["equal"] / row["versions"], 1.0, True)
    report.end(json)


def replay(recording: Recording) -> dict[str, Any]:
    """Replays a run; returns the figures."""
    from fairseq_async.fairseq_plugin.replayed import FairseqRun

    began = time.monotonic()
    with quiet():
        repeated = Replay(recording, FairseqRun(recording.run_dir, recording.spec, recording.events))
        for _ in repeated.steps():
            pass
    seconds = time.monotonic() - began
    checked = sum(event.checksum is not None for event in recording.events)
    found = {"updates": len(recording.events), "versions": checked, "equal": repeated.compared}
    return found | {"seconds of the replay": seconds}


if __name__ == "__main__":
    run_main(main)
