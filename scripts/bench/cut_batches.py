"""Measures what it costs to cut batches: target tokens a second of forward and backward passes, by `--micro-batches`.

The sizes take turns within each round, so that other programs slow all of them down alike.
"""

from __future__ import annotations

import sys
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.simulation.problems.translation import Translation  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.report import Report  # noqa: E402


def tokens_a_second(problem: Translation, samples: cycle[int], seconds: float) -> float:
    """Returns the target tokens a second of passes for so many seconds; on a GPU it waits for the last of them."""
    begin, tokens = time.perf_counter(), 0.0
    while (passed := time.perf_counter() - begin) < seconds:
        loss, size = problem.loss(problem.batch([next(samples)]))
        loss.backward()
        tokens += size
        if problem.device.type == "cuda":
            torch.cuda.synchronize()
    return tokens / passed


def main(
    data: Annotated[Path, typer.Option(help="What fairseq-preprocess has made.")],
    arch: Annotated[str, typer.Option()] = "transformer_iwslt_de_en",
    max_tokens: Annotated[int, typer.Option()] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Of each size in a round.")] = 10.0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print the tokens a second of each size, and the ratio to whole batches."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = f"--arch {arch} --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens"
    sizes = {m: Translation(1, device, data, f"{flags} {max_tokens // m}", validation=1) for m in (1, 2, 4, 8)}
    samples = {m: cycle(range(problem.samples)) for m, problem in sizes.items()}
    for m, problem in sizes.items():  # the first passes allocate memory
        tokens_a_second(problem, samples[m], 1.0)
    found = [{m: tokens_a_second(problem, samples[m], seconds) for m, problem in sizes.items()} for _ in range(rounds)]
    report = Report(f"Batches of at most {max_tokens} tokens that are cut, {arch}, {device.type}")
    report.table(
        "target tokens a second",
        [
            {
                "micro-batches": m,
                "tokens each": max_tokens // m,
                "tokens a second": median(each[m] for each in found),
                "of whole batches": median(each[m] / each[1] for each in found),
            }
            for m in sizes
        ],
    )
    report.end(json_file)


if __name__ == "__main__":
    run_main(main)
