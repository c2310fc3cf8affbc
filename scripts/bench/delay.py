"""Measures what a fixed delay of the gradients costs AdamW and Muon, with and without look-ahead, on C4.

Step v is taken with a gradient that was computed τ versions earlier, at what a worker started from then: the parameters
of version v − τ, or where the look-ahead took them. Look-ahead and optimizers are those of the server. Muon steps
the matrices of the layers, AdamW the embeddings and the norms, at one rate (``match_rms_adamw``).

The rate of each cell is its own: the one with the least loss of seed 0 among powers of two times the first, as far as
the best one has a worse one on each side. Seeds 1 to N are then run at that rate, and only these are reported. Results
of runs are kept, and these are not run again.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim import AdamW, Muon, Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.server.rounds.look_ahead import LookAhead  # noqa: E402
from recipes.c4_lm.simulated import C4  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

VOCABULARY, SEQUENCE, VALIDATION = 2000, 64, 256  # pieces, tokens, sequences
BATCH, WARMUP, LEAST = 4, 20, 0.1  # sequences; steps; share of the rate at the end of the cosine
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
FIRST_RATE = 2e-3
LOOKS = ("none", "fixed", "measured")  # how far ahead workers start: not at all, τ steps, as the server measures
FEEDBACK = "feedback"  # no look-ahead, but error feedback of whole steps: x ← x − u − τ (u − u′), arXiv 2606.30634


def make_optimizers(kind: str, model: torch.nn.Module, lr: float) -> list[Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if kind == "muon" and p.ndim == 2 and "embed" not in name]
    rest = [p for _, p in named if all(p is not each for each in matrices)]
    found: list[Optimizer] = [AdamW(rest, lr=lr, betas=BETAS, weight_decay=DECAY)]
    return [*found, Muon(matrices, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")] if matrices else found


def rate_at(step: int, steps: int, lr: float) -> float:
    cosine = LEAST + (1 - LEAST) * (1 + math.cos(math.pi * step / steps)) / 2
    return lr * min((step + 1) / WARMUP, 1.0) * cosine


class Starts:
    """What workers start from: the parameters of each version, or a point ahead of them.

    Args:
        delay: τ, the versions between a start and the step of its gradient.
        look: one of :data:`LOOKS`, or :data:`FEEDBACK`.
    """

    def __init__(self, delay: int, look: str, parameters: Tensor) -> None:
        self.delay, self.versions = delay, 0
        self.look_ahead = LookAhead({"none": 0.0, "fixed": float(delay), "measured": None, FEEDBACK: 0.0}[look])
        self.look_ahead.follow(0, parameters)
        self._last = parameters
        self._kept = deque([parameters], maxlen=delay + 1)

    def next(self) -> Tensor:
        """Returns the start of the gradient with which the coming step is taken."""
        return self._kept[0]

    def stepped(self, parameters: Tensor) -> None:
        """Takes the parameters of the next version."""
        self.look_ahead.note(0, self.versions + 1 - len(self._kept), len(self._kept) - 1)
        self.versions += 1
        self.look_ahead.follow(self.versions, parameters)
        self._kept.append(parameters + self.look_ahead.of(0) * (parameters - self._last))
        self._last = parameters


def train(data: Path, tokens: str, kind: str, delay: int, look: str, lr: float, steps: int, seed: int) -> float:
    """Returns the last validation loss; infinite where it is none."""
    torch.manual_seed(seed)
    c4 = C4(seed, torch.device("cpu"), data, vocab=VOCABULARY, out=tokens, sequence=SEQUENCE, validation=VALIDATION)
    draw, parameters = torch.Generator().manual_seed(seed), list(c4.model.parameters())
    steppers = make_optimizers(kind, c4.model, lr)
    starts = Starts(delay, look, parameters_to_vector(parameters).detach().clone())
    correction, last = (float(delay) if look == FEEDBACK else 0.0), None
    for step in range(steps):
        now = parameters_to_vector(parameters).detach().clone()
        vector_to_parameters(starts.next(), parameters)
        c4.model.zero_grad()
        c4.loss(c4.batch(torch.randint(c4.samples, (BATCH,), generator=draw).tolist()))[0].backward()
        clip_grad_norm_(parameters, CLIP)
        vector_to_parameters(now.clone(), parameters)  # they become views of it, and the step changes them
        for each in steppers:
            for group in each.param_groups:
                group["lr"] = rate_at(step, steps, lr)
            each.step()
        update = now - parameters_to_vector(parameters).detach()
        if correction and last is not None:  # the first step is as it is
            vector_to_parameters(now - update - correction * (update - last), parameters)
        last = update
        starts.stepped(parameters_to_vector(parameters).detach().clone())
    loss = c4.evaluate()
    return loss if math.isfinite(loss) else math.inf


class Bench:
    """Runs each cell at its own best rate, and keeps the losses in ``out``."""

    def __init__(self, data: Path, out: Path, steps: int, seeds: int) -> None:
        self.data, self.out, self.steps, self.seeds = data, out, steps, seeds
        self._losses = Kept(out / "losses.jsonl", float)

    def loss(self, kind: str, delay: int, look: str, lr: float, seed: int) -> float:
        key = f"{kind}; delay {delay}; look-ahead {look}; rate {lr:g}; {self.steps} steps; seed {seed}"
        if key not in self._losses:
            found = train(self.data, str(self.out / "tokens"), kind, delay, look, lr, self.steps, seed)
            self._losses.keep(key, min(found, 1e9))
            print(f"{key}: {found:.4f}", file=sys.stderr, flush=True)
        return self._losses[key]

    def best_rate(self, kind: str, delay: int, look: str) -> float:
        """Returns the rate with the least loss of seed 0; its neighbours have been tried."""
        best = FIRST_RATE
        while True:
            near = min((best / 2, best, best * 2), key=lambda lr: self.loss(kind, delay, look, lr, 0))
            if near == best:
                return best
            best = near

    def cell(self, kind: str, delay: int, look: str) -> tuple[float, list[float]]:
        """Returns the rate of a cell, and the losses of its seeds."""
        lr = self.best_rate(kind, delay, look)
        return lr, [self.loss(kind, delay, look, lr, seed) for seed in range(1, self.seeds + 1)]


def row(bench: Bench, kind: str, delay: int, look: str) -> dict[str, Any]:
    lr, losses = bench.cell(kind, delay, look)
    _, current = bench.cell(kind, 0, "none")
    above = [loss / none - 1 for loss, none in zip(losses, current, strict=True)]
    return {
        "optimizer": kind,
        "delay": delay,
        "look-ahead": look,
        "rate": lr,
        "losses": ", ".join(f"{loss:.3f}" for loss in losses),
        "above no delay": f"{100 * fmean(above):+.1f}%",
    }


def main(
    data: Annotated[Path, typer.Option(help="Directory with C4 shards.", exists=True)],
    optimizers: Annotated[str, typer.Option(help="With commas between them.")] = "adamw,muon",
    delays: Annotated[str, typer.Option(help="Versions τ, likewise.")] = "1,2,4",
    looks: Annotated[str, typer.Option(help="How far ahead workers start, likewise; or feedback.")] = ",".join(LOOKS),
    steps: Annotated[int, typer.Option(min=1)] = 200,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/bench/delay"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Print the last losses of each optimizer, delay and look-ahead, at the best rate of each."""
    torch.set_num_threads(1)
    report = Report(f"Gradients that are τ versions late: C4 tiny, {steps} steps of {BATCH}x{SEQUENCE} tokens")
    bench = Bench(data, out, steps, seeds)
    cells = [(0, "none"), *((int(delay), look) for delay in delays.split(",") for look in looks.split(","))]
    report.table("Loss by delay", [row(bench, kind, *cell) for kind in optimizers.split(",") for cell in cells])
    report.end(json)


if __name__ == "__main__":
    run_main(main)
