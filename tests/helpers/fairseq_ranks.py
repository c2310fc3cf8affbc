"""Ranks that run one ``fairseq-train`` job after the other, since their start takes longest.

``python fairseq_ranks.py JOBS.json RANK``: a job is {"name", "ranks", "flags", "spoil"}. What a rank writes comes to
NAME-RANK.log beside the file of jobs, with its exit code in the last line, and its last checkpoint to NAME.pt.
"""

import contextlib
import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as Criterion
from fairseq.distributed import utils as distributed
from fairseq.models.transformer import TransformerModel
from fairseq.tasks import FairseqTask
from fairseq_cli import train

from fairseq_async.fairseq_plugin import session

FORWARD, BUILD, STEP = Criterion.forward, TransformerModel.build_model, FairseqTask.train_step
MAIN, CONVERT, TRAINER = train.main, train.convert_namespace_to_omegaconf, train.Trainer


def nan_in_the_third_batch() -> None:
    """On this rank."""
    batches = 0

    def forward(self: Any, model: Any, sample: Any, reduce: bool = True) -> Any:
        nonlocal batches
        loss, sample_size, output = FORWARD(self, model, sample, reduce)
        batches += model.training
        return loss * (float("nan") if model.training and batches == 3 else 1.0), sample_size, output

    Criterion.forward = forward


def other_parameters() -> None:
    """On this rank."""

    def build(cls: Any, *args: Any) -> Any:
        model = BUILD(*args)
        with torch.no_grad():
            model.decoder.layers[0].fc2.bias.add_(1e-7)
        return model

    TransformerModel.build_model = classmethod(build)


def summed_losses() -> None:
    """Batches are taken together before backward: the task keeps the losses of all but the last of a step."""
    kept: list[Any] = []

    def forward(self: Any, model: Any, sample: Any, reduce: bool = True) -> Any:
        loss, sample_size, output = FORWARD(self, model, sample, reduce)
        if not model.training:
            return loss, sample_size, output
        kept.append(loss)
        if len(kept) % 2:
            return loss.detach().requires_grad_(), sample_size, output
        return kept[-2] + kept[-1], sample_size, output

    Criterion.forward = forward


def parts_of_batches() -> None:
    """The task calls backward twice for each batch, as multilingual_translation does for two languages; the two losses
    have no parameter in common, as without shared encoders and decoders."""

    def train_step(self: Any, sample: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        for trained, other in ((model.encoder, model.decoder), (model.decoder, model.encoder)):
            trained.requires_grad_(True)
            other.requires_grad_(False)
            results = STEP(self, sample, model, *args, **kwargs)
        model.requires_grad_(True)
        return results

    FairseqTask.train_step = train_step


SPOIL = {
    "nan": nan_in_the_third_batch,
    "parameters": other_parameters,
    "summed": summed_losses,
    "parts": parts_of_batches,
}


@contextlib.contextmanager
def spoilt(job: dict[str, Any], rank: int) -> Iterator[None]:
    if job["spoil"] and rank == job["ranks"] - 1:
        SPOIL[job["spoil"]]()
    try:
        yield
    finally:
        Criterion.forward, TransformerModel.build_model, FairseqTask.train_step = FORWARD, BUILD, STEP


def run(job: dict[str, Any], rank: int, folder: Path) -> None:
    flags = list(job["flags"])
    if job["ranks"] > 1:
        flags += ["--distributed-world-size", str(job["ranks"]), "--distributed-rank", str(rank)]
        flags += ["--distributed-no-spawn", "--distributed-init-method", f"file://{folder}/{job['name']}.rendezvous"]
    with (folder / f"{job['name']}-{rank}.log").open("w") as log, spoilt(job, rank):
        handler = logging.StreamHandler(log)
        logging.getLogger().addHandler(handler)
        sys.argv, code = ["fairseq-train", *flags], 0
        train.main, train.convert_namespace_to_omegaconf, train.Trainer = MAIN, CONVERT, TRAINER
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            try:
                train.cli_main()
            except SystemExit as end:
                code = int(end.code or 0)
        logging.getLogger().removeHandler(handler)
        log.write(f"\nexit code {code}\n")
    last = Path(flags[flags.index("--save-dir") + 1]) / "checkpoint_last.pt"
    if rank == 0 and last.exists():
        shutil.copy(last, folder / f"{job['name']}.pt")
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if hasattr(distributed.get_global_group, "_global_group"):
        del distributed.get_global_group._global_group


def main() -> None:
    torch.set_num_threads(1)
    session._RANK_0_FIRST = 0.0
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    for job in json.loads(path.read_text()):
        if rank < job["ranks"]:
            run(job, rank, path.parent)
    os._exit(0)  # a Gloo process may abort at its exit after a job that has failed


if __name__ == "__main__":
    main()
