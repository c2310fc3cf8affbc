"""A worker's training loop: local steps to the end of the run, with progress, scores and checkpoints."""

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
LOG_SECONDS = 5.0  # seconds between lines of progress
KEPT = 2  # checkpoints of each worker


class Run:
    """The training loop of one worker. Worker 0 also scores and saves the server's parameters.

    An interrupted run loses the steps after its last checkpoint; without `eval_every` it loses all of them.

    Args:
        engine: the engine of `fairseq_async.deepspeed_plugin`.
        out: directory for the model and the checkpoints.
        length: mean local steps of a worker in the whole run.
        tokenizer: file of the sentencepiece model, which is saved beside the model.
    """

    def __init__(
        self, engine: Any, spec: ModelSpec, out: Path, length: int, tokenizer: Path, validation_set: PackedDataset
    ) -> None:
        self.engine, self.spec, self.out, self.length = engine, spec, out, length
        self.tokenizer, self.validation_set = tokenizer, validation_set
        self.is_writer = engine.worker == 0 and engine.global_rank == 0
        self.losses: list[torch.Tensor] = []
        self.started = self.logged = time.monotonic()

    def resume(self) -> None:
        """Resume from the last checkpoint, if there is one."""
        if (self.out / CHECKPOINTS / "latest").exists():
            self.engine.load_checkpoint(str(self.out / CHECKPOINTS))

    def train(self, loader: Any, eval_every: int | None) -> None:
        """Train until the loader ends, which is the end of the run; then score and save."""
        engine, every = self.engine, eval_every or float("inf")
        kept = engine.progress // every
        for batch in loader:
            loss = engine(**{name: ids.to(engine.device) for name, ids in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            self.log_progress(loss.detach())
            if engine.progress // every > kept and not engine.finished:
                kept = engine.progress // every
                self.keep()
        self.keep()

    def log_progress(self, loss: torch.Tensor) -> None:
        """Prints a line of progress every few seconds."""
        self.losses.append(loss)
        now = time.monotonic()
        if now - self.logged < LOG_SECONDS:
            return
        if self.is_writer:
            mean, seconds = torch.stack(self.losses).mean().item(), now - self.started
            print(f"{self.done()}, {self.engine.global_steps:,} own, loss {mean:.3f}, {seconds:,.0f} s", flush=True)
        self.losses, self.logged = [], now

    def done(self) -> str:
        """Return the progress of the run as text, from the server's last answer."""
        return f"{self.engine.progress:,.0f} of {self.length:,} steps"

    def keep(self) -> None:
        """Score and save the server's parameters, and save every worker's state for a resumed run."""
        engine, checkpoints = self.engine, self.out / CHECKPOINTS
        if engine.worker == 0:
            engine.pull()
        if self.is_writer:
            batch_size = engine.train_micro_batch_size_per_gpu()
            score = perplexity(engine.module, self.validation_set, batch_size, engine.device)
            print(f"{self.done()}: {score}", flush=True)
            save_model(engine.module, self.spec, self.out / MODEL)
            shutil.copy(self.tokenizer, tokenizer_in(self.out / MODEL))
        engine.save_checkpoint(str(checkpoints))
        if engine.context.rank == 0:
            prune(checkpoints / f"worker-{engine.worker}" if engine.worker else checkpoints)


def prune(directory: Path) -> None:
    """Delete all but the newest checkpoints of a worker."""
    saved = sorted(directory.glob("global_step*"), key=lambda path: path.stat().st_mtime)
    for path in saved[:-KEPT]:
        shutil.rmtree(path)
