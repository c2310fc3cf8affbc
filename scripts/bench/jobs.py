"""Starts the training runs that benchmarks compare, and prepares their data."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recipes import training, translation  # noqa: E402
from recipes.made_up_pair.make_corpus import PAIR, make_corpus  # noqa: E402
from recipes.steps import RecipeError, console_script, once, run_step  # noqa: E402
from recipes.training import Method, Training  # noqa: E402

PIECES = 800
# A timed run neither validates nor saves, on either side; a log record covers only the interval since the last one.
TIMED: dict[str, object] = {"disable-validation": True, "no-save": True, "log-interval": 5}


def claim(out: Path) -> None:
    """Lock `out` for this process: two benchmarks would delete each other's files and disturb each other's times."""
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"another benchmark is running in {out}: wait for it, or change --out") from None
    _locks.append(lock)  # held until this process ends


_locks: list[IO[str]] = []


def corpus(data: Path | None, out: Path) -> Path:
    """Return `data`, a binarised data set, or else make a made-up language pair under `out`."""
    if data is not None:
        if not (data / "preprocess.log").exists() and not list(data.glob("dict.*.txt")):
            raise RecipeError(f"--data {data}: no dict.*.txt there; give a directory that fairseq-preprocess has made")
        return data
    text = once(out / "text", make_corpus)
    pieces = translation.encode(text, PAIR, translation.learn_pieces(text, PAIR, PIECES, out), out)
    return translation.binarise(pieces, PAIR, out)


def fresh(job: Training) -> None:
    """Delete the files of an earlier call in the job's directory."""
    shutil.rmtree(job.save_dir, ignore_errors=True)
    job.log.parent.mkdir(parents=True)


def run(job: Training, launch_flags: Sequence[str] = ()) -> None:
    """Train from the first step, without the files of an earlier call."""
    fresh(job)
    if job.method in (Method.SYNC, Method.SINGLE):
        training.train_local(job)
    else:
        command = [console_script("fairseq-async"), "launch", "--workers", str(job.workers), *launch_flags, "--"]
        run_step(f"{job.save_dir.name}", command + job.command(), job.log.with_name("launch.log"))


def parameters(job: Training) -> int:
    """Return the number of parameters that a job's server held."""
    layout = json.loads((job.save_dir / "run.json").read_text())["layout"]
    return sum(math.prod(shape) for _, shape, _ in layout)
