"""Compares workers of two ranks with fairseq's own synchronous run, in bf16: the validation loss at the end.

Two workers of two ranks each, with --barrier, beside four synchronous ranks of plain fairseq (legacy_ddp over Gloo),
on the same batches from the same seeds. In bf16 the two sides round different sums, so parameters drift apart: the
loss is what can be compared.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training, statistics  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.exactness import ADAM, MODEL  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

SEEDS = (1, 2, 3)
PERCENT = 0.5  # bound of the mean difference of the losses, without its sign
WORKERS, RANKS = 2, 2
SETTINGS = {
    **MODEL,
    "dropout": 0.1,
    "criterion": "label_smoothed_cross_entropy",
    "label-smoothing": 0.1,
    "clip-norm": 1.0,
    "lr-scheduler": "inverse_sqrt",
    "warmup-updates": 50,
    "no-epoch-checkpoints": True,
    "num-workers": 0,
    "bf16": True,
}


@dataclass(frozen=True)
class Job(Training):
    """A run of one of the two sides."""

    def optimizer(self) -> dict[str, object]:
        """Returns the flags of Adam, alone or in hybrid_async behind a barrier."""
        if self.method is Method.SYNC:
            return dict(ADAM) | {"user-dir": jobs.ROOT / "scripts/bench/plain_on_cpu"}
        return dict(ADAM) | {"optimizer": "hybrid_async", "inner-optimizer": "adam", "barrier": True}


def loss(method: Method, workers: int, seed: int, binary: Path, out: Path, updates: int) -> float:
    """Trains; returns the last validation loss."""
    settings = SETTINGS | {"seed": seed, "max-update": updates}
    job = Job(binary, out / f"{method.value}-{seed}", method, workers, 512, settings)
    jobs.run(job, ["--ranks-per-worker", str(RANKS)])
    return float([*statistics(job.log, "valid")][-1]["valid_loss"])


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set; by default a made-up pair is used.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus, checkpoints and logs.")] = Path("runs/bench"),
    updates: Annotated[int, typer.Option(min=1, help="Updates of each run.")] = 200,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the losses over three seeds; exit code 1 if they differ by more than the bound."""
    report = Report(f"Islands in bf16: validation loss in bits after {updates} updates of Adam")
    jobs.claim(out)
    binary, rows = jobs.corpus(data, out), list[dict[str, Any]]()
    for seed in SEEDS:
        plain = loss(Method.SYNC, WORKERS * RANKS, seed, binary, out / "islands-loss", updates)
        ours = loss(Method.HYBRID, WORKERS, seed, binary, out / "islands-loss", updates)
        rows.append({"seed": seed, "plain": plain, "workers of two": ours, "percent more": 100 * (ours / plain - 1)})
    report.table(f"{WORKERS} workers of {RANKS} ranks with a barrier, beside {WORKERS * RANKS} of plain fairseq", rows)
    means = [sum(row[name] for row in rows) / len(rows) for name in ("plain", "workers of two")]
    report.bound("percent between the mean losses", abs(100 * (means[1] / means[0] - 1)), PERCENT)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
