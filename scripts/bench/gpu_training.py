"""Measures what the exchange costs workers on a GPU: their target tokens per second beside those of plain fairseq.

Runs come one after the other on the same GPU, with the same model and batches: the base Transformer of Vaswani et al.
(2017), 44 million parameters and the vocabulary, in fp16, with batches of 4,096 tokens. With two workers, plain fairseq
is two processes at once, which know nothing of each other. The rounds that `--rounds` asks for alternate plain fairseq
and the server on the GPU; the first one has all runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.records.events import read_events  # noqa: E402
from recipes.multi30k_en_de.presets import Preset  # noqa: E402
from recipes.steps import RecipeError, run_main  # noqa: E402
from recipes.training import Method, Training, statistics  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

BASE = Preset(layers=6, dim=512, ffn=2048, dropout=0.1, max_tokens=4096)
LOCAL, HYBRID = 0.95, 0.97  # of plain's tokens a second, at least
LOCAL_STEPS = 20
PLAIN, ON_GPU = "plain fairseq", "hybrid, server on the GPU"
# cuDNN's attention, torch's choice on a GPU, makes a plan for each new shape of a batch: half of a plain step's time
FASTEST = str(Path(__file__).parent / "without_cudnn_attention")


@dataclass(frozen=True)
class LocalTraining(Training):
    """A run of local SGD with Adam in the worker; `overlap` lets it go on while the update is on its way."""

    overlap: bool = False

    def optimizer(self) -> dict[str, object]:
        """Return the optimizer's flags."""
        ours = {"optimizer": "local_sgd", "inner-optimizer": "adam", "local-steps": LOCAL_STEPS}
        return ours | ({"overlap": True} if self.overlap else {})


def speed(jobs_at_once: Sequence[Training], skip: float) -> float:
    """Returns the target tokens per second of all workers of these runs, after their first `skip` seconds."""
    with ThreadPoolExecutor(len(jobs_at_once)) as pool:
        list(pool.map(jobs.run, jobs_at_once))
    logs = [job.log.with_name(f"worker-{worker}.log") for job in jobs_at_once for worker in range(job.workers)]
    return sum(speed_in(log, skip) for log in logs)


def speed_in(log: Path, skip: float) -> float:
    """Returns a worker's target tokens per second, from its log."""
    tokens = seconds = before = 0.0
    for record in statistics(log, "train_inner"):
        between, before = float(record["wall"]) - before, float(record["wall"])
        if before > skip:
            tokens += float(record["wps"]) * between
            seconds += between
    if not seconds:
        raise RecipeError(f"the run ended before its steady state: raise --seconds (log: {log})")
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
    workers: Annotated[int, typer.Option(min=1, help="On the one GPU.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of plain fairseq and the server on the GPU.")] = 3,
    pair: Annotated[bool, typer.Option("--pair", help="Leave the other runs out.")] = False,
    as_it_is: Annotated[bool, typer.Option("--as-it-is", help="With cuDNN's attention, torch's choice.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Measure workers' speed on a GPU against plain fairseq; exit code 1 if a bound is broken."""
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU, and this measures one")
    if not as_it_is:
        os.environ["PYTHONPATH"] = f"{FASTEST}:{os.environ.get('PYTHONPATH', '')}"
    report = Report(f"{workers} at once on a GPU: {torch.cuda.get_device_name()}")
    jobs.claim(out)
    runs = runs_of(jobs.corpus(data, out), out, seconds, shards, workers)
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        names = [PLAIN, ON_GPU] if pair or number else list(runs)
        for name in names:
            value = speed(runs[name], skip)
            plain = value if name == PLAIN else next(row["tokens/s"] for row in reversed(rows) if row["run"] == PLAIN)
            exchange = exchange_seconds(runs[name][0])
            rows.append(
                {"round": number + 1, "run": name, "tokens/s": value, "of plain": value / plain, "exchange s": exchange}
            )
            report.table(f"fp16, {BASE.max_tokens:,} tokens a batch", rows)
            report.write(json)
    print(f"{jobs.parameters(runs[ON_GPU][0]):,} parameters")
    shares = [row["of plain"] for row in rows if row["run"] == ON_GPU]
    report.bound("tokens/s of hybrid with the server on the GPU, of plain's", median(shares), HYBRID, at_least=True)
    if not pair:
        kept = min(row["of plain"] for row in rows if row["run"].startswith("local"))
        report.bound("tokens/s of local SGD, of plain's", kept, LOCAL, at_least=True)
    report.end(json)


def runs_of(data: Path, out: Path, seconds: float, shards: int, workers: int) -> dict[str, list[Training]]:
    """Returns the runs by their names, each with what runs at the same time."""
    settings = BASE.settings() | jobs.TIMED | {"seed": 1, "stop-time-hours": seconds / 3600, "fp16": True}
    settings |= {"encoder-attention-heads": 8, "decoder-attention-heads": 8}
    plain = [
        Training(data, out / f"plain-{each}", Method.SINGLE, 1, BASE.max_tokens, settings) for each in range(workers)
    ]
    hybrid = replace(plain[0], save_dir=out / "hybrid", method=Method.HYBRID, workers=workers)
    local = LocalTraining(**vars(hybrid) | {"save_dir": out / "local"})

    def other(name: str, **settings_too: object) -> Training:
        return replace(hybrid, save_dir=out / name, settings=settings | settings_too)

    return {
        PLAIN: plain,
        ON_GPU: [other("on-gpu", **{"server-device": "cuda"})],
        "hybrid": [hybrid],
        f"hybrid, {shards} shards": [other("shards", **{"server-shards": shards})],
        f"local SGD, H = {LOCAL_STEPS}": [local],
        f"local SGD, H = {LOCAL_STEPS}, --overlap": [replace(local, save_dir=out / "overlap", overlap=True)],
    }


if __name__ == "__main__":
    run_main(main)
