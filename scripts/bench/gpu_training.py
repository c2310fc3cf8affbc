"""Measures what the exchange costs a worker on a GPU: its target tokens per second beside those of plain fairseq.

All runs are one process on the GPU, one after the other, with the same model and batches: the base Transformer of
Vaswani et al. (2017), 44 million parameters and the vocabulary, in fp16, with batches of 4,096 tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.records.events import read_events  # noqa: E402
from recipes.multi30k_en_de.presets import Preset  # noqa: E402
from recipes.steps import RecipeError  # noqa: E402
from recipes.training import Method, Training, statistics  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

BASE = Preset(layers=6, dim=512, ffn=2048, dropout=0.1, max_tokens=4096)
SHARE_OF_STEP = 0.05  # of local SGD, which the exchange may cost; hybrid has the server's step in each of its own
LOCAL_STEPS = 20


@dataclass(frozen=True)
class LocalTraining(Training):
    """A run of local SGD with Adam in the worker; `overlap` lets it go on while the update is on its way."""

    overlap: bool = False

    def optimizer(self) -> dict[str, object]:
        """Return the optimizer's flags."""
        ours = {"optimizer": "local_sgd", "inner-optimizer": "adam", "local-steps": LOCAL_STEPS}
        return ours | ({"overlap": True} if self.overlap else {})


def speed(job: Training, skip: float) -> float:
    """Returns the target tokens per second of the run's first worker, after its first `skip` seconds."""
    jobs.run(job)
    tokens = seconds = before = 0.0
    for record in statistics(job.log, "train_inner"):
        between, before = float(record["wall"]) - before, float(record["wall"])
        if before > skip:
            tokens += float(record["wps"]) * between
            seconds += between
    if not seconds:
        raise RecipeError(f"the run ended before its steady state: raise --seconds (log: {job.log})")
    return tokens / seconds


def exchange_seconds(job: Training) -> float | None:
    """Returns the median seconds of an exchange with the server, which includes its step; None without a server.

    The first two events are left out: the server's first step allocates the optimizer's state, and an event has the
    seconds of the exchange before.
    """
    if not job.events.exists():
        return None
    events = read_events(job.events)[2:]
    return median(event.exchange_seconds for event in events) if events else None


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench"),
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of training of each run.")] = 40,
    skip: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that are not counted.")] = 15,
    shards: Annotated[int, typer.Option(min=2, help="Of the server, in one of the runs.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often all runs are made.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure a worker's speed on a GPU against plain fairseq; exit code 1 if the bound is broken."""
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU, and this measures one")
    report = Report(f"One worker on a GPU: {torch.cuda.get_device_name()}")
    jobs.claim(out)
    settings = BASE.settings() | jobs.TIMED | {"seed": 1, "stop-time-hours": seconds / 3600, "fp16": True}
    settings |= {"encoder-attention-heads": 8, "decoder-attention-heads": 8}
    plain = Training(jobs.corpus(data, out), out / "plain", Method.SINGLE, 1, BASE.max_tokens, settings)
    hybrid = replace(plain, save_dir=out / "hybrid", method=Method.HYBRID)
    in_shards = settings | {"server-shards": shards}
    local = LocalTraining(**vars(plain) | {"save_dir": out / "local", "method": Method.HYBRID})
    runs = {
        "plain fairseq": plain,
        "hybrid": hybrid,
        f"hybrid, {shards} shards": replace(hybrid, save_dir=out / "shards", settings=in_shards),
        "hybrid, server on the GPU": replace(
            hybrid, save_dir=out / "on-gpu", settings=settings | {"server-device": "cuda"}
        ),
        f"local SGD, H = {LOCAL_STEPS}": local,
        f"local SGD, H = {LOCAL_STEPS}, --overlap": replace(local, save_dir=out / "overlap", overlap=True),
    }
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        speeds = {name: speed(job, skip) for name, job in runs.items()}
        for name, value in speeds.items():
            share = value / speeds["plain fairseq"]
            exchange = exchange_seconds(runs[name])
            rows.append(
                {"round": number + 1, "run": name, "tokens/s": value, "of plain": share, "exchange s": exchange}
            )
    report.table(f"{jobs.parameters(local):,} parameters, fp16, {BASE.max_tokens:,} tokens a batch", rows)
    kept = min(row["of plain"] for row in rows if row["run"].startswith("local"))
    report.bound("local SGD's tokens/s, of plain fairseq's", kept, 1 - SHARE_OF_STEP, at_least=True)
    report.end(json)


if __name__ == "__main__":
    typer.run(main)
