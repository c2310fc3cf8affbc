"""A worker's training run: local steps until the run is over, progress, scores and checkpoints."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch

from recipes.c4_lm.evaluate import perplexity
from recipes.c4_lm.models import ModelSpec, save_model
from recipes.c4_lm.tokens import PackedDataset, tokenizer_in

MODEL, CHECKPOINTS = "model", "checkpoints"  # in --out
SPEAK_EVERY = 5.0  # seconds between lines of progress
KEPT = 2  # checkpoints of each worker


class Run:
    """What a worker does with its engine. Worker 0 also scores and saves the server's parameters.

    A run that is broken off loses what came after its last checkpoint; without `eval_every` that is all of it.

    Args:
        engine: of `fairseq_async.deepspeed_plugin`.
        out: for the model and the checkpoints.
        length: mean local steps of a worker in the whole run.
        tokenizer: goes with the model.
    """

    def __init__(
        self, engine: Any, spec: ModelSpec, out: Path, length: int, tokenizer: Path, validation_set: PackedDataset
    ) -> None:
        self.engine, self.spec, self.out, self.length = engine, spec, out, length
        self.tokenizer, self.validation_set = tokenizer, validation_set
        self.speaks = engine.worker == 0 and engine.global_rank == 0
        self.losses: list[torch.Tensor] = []
        self.started = self.spoken = time.monotonic()

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        if (self.out / CHECKPOINTS / "latest").exists():
            self.engine.load_checkpoint(str(self.out / CHECKPOINTS))

    def train(self, loader: Any, eval_every: int | None) -> None:
        """Train until the run is over, which is where the loader ends; keep the result."""
        engine, every = self.engine, eval_every or float("inf")
        kept = engine.progress // every
        for batch in loader:
            loss = engine(**{name: ids.to(engine.device) for name, ids in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            self.speak(loss.detach())
            if engine.progress // every > kept and not engine.finished:
                kept = engine.progress // every
                self.keep()
        self.keep()

    def speak(self, loss: torch.Tensor) -> None:
        """A line of progress, every few seconds."""
        self.losses.append(loss)
        now = time.monotonic()
        if now - self.spoken < SPEAK_EVERY:
            return
        if self.speaks:
            mean, seconds = torch.stack(self.losses).mean().item(), now - self.started
            print(f"{self.done()}, {self.engine.global_steps:,} own, loss {mean:.3f}, {seconds:,.0f} s", flush=True)
        self.losses, self.spoken = [], now

    def done(self) -> str:
        """How far the run is, as the server last said."""
        return f"{self.engine.progress:,.0f} of {self.length:,} steps"

    def keep(self) -> None:
        """Score and save the server's parameters, and save every worker so that it can go on."""
        engine, checkpoints = self.engine, self.out / CHECKPOINTS
        if engine.worker == 0:
            engine.pull()
        if self.speaks:
            batch_size = engine.train_micro_batch_size_per_gpu()
            score = perplexity(engine.module, self.validation_set, batch_size, engine.device)
            print(f"{self.done()}: {score}", flush=True)
            save_model(engine.module, self.spec, self.out / MODEL)
            shutil.copy(self.tokenizer, tokenizer_in(self.out / MODEL))
        engine.save_checkpoint(str(checkpoints))
        if engine.place.rank == 0:
            prune(checkpoints / f"worker-{engine.worker}" if engine.worker else checkpoints)


def prune(directory: Path) -> None:
    """Delete all but the newest checkpoints of a worker."""
    saved = sorted(directory.glob("global_step*"), key=lambda path: path.stat().st_mtime)
    for path in saved[:-KEPT]:
        shutil.rmtree(path)
