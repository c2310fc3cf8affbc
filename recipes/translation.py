"""The steps that translation recipes share, from text to BLEU; each step reuses the files of an earlier call.

A corpus is a directory that holds `{train,valid,test}.{source,target}`, one sentence a line.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
from sacrebleu.metrics import BLEU

import fairseq_async
from recipes.steps import RecipeError, console_script, once, run_step, write_whole

SPLITS = ("train", "valid", "test")
USER_DIR = str(Path(fairseq_async.__file__).parent)


@dataclass(frozen=True)
class Score:
    """A BLEU score and the signature that says how it was computed."""

    bleu: float
    signature: str


def lines(path: Path) -> list[str]:
    """Return the sentences of a file; only a newline ends one, because Unicode's other separators occur in text."""
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")


def learn_pieces(corpus: Path, pair: tuple[str, str], size: int, out: Path) -> Path:
    """Learn a BPE model of `size` pieces on both sides of the training set."""

    def learn(directory: Path) -> None:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(corpus / f"train.{language}") for language in pair],
            model_prefix=str(directory / "joint"),
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            minloglevel=2,
        )

    return once(out / "sentencepiece", learn) / "joint.model"


def encode(corpus: Path, pair: tuple[str, str], model: Path, out: Path) -> Path:
    """Write the corpus split into sentencepiece pieces."""

    def write(directory: Path) -> None:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        for name in (f"{split}.{language}" for split in SPLITS for language in pair):
            pieces = processor.encode(lines(corpus / name), out_type=str)
            (directory / name).write_text("".join(" ".join(p) + "\n" for p in pieces), encoding="utf-8")

    return once(out / "pieces", write)


def binarise(corpus: Path, pair: tuple[str, str], out: Path) -> Path:
    """Write the corpus as fairseq's binary data set, with one dictionary for both languages."""

    def write(directory: Path) -> None:
        command = [console_script("fairseq-preprocess"), "--joined-dictionary", "--destdir", str(directory)]
        command += ["--source-lang", pair[0], "--target-lang", pair[1]]
        for split in SPLITS:
            command += [f"--{split}pref", str(corpus / split)]
        run_step("binarising", command, out / "logs" / "preprocess.log")

    return once(out / "binary", write)


def load_checkpoint(path: Path) -> dict:
    """Read a fairseq checkpoint, with `argparse.Namespace`, which it holds, on torch's list of trusted types."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True)


def last_checkpoints(save_dir: Path, count: int) -> list[dict]:
    """Return the newest `count` checkpoints of ends of epochs and of the end of training, oldest first.

    The end of training counts too, because an asynchronous run ends at a total of target tokens, in the middle of an
    epoch of worker 0, which saves.
    """
    paths = [p for p in save_dir.glob("checkpoint*.pt") if re.fullmatch(r"checkpoint(\d+|_last)", p.stem)]
    states = {state["optimizer_history"][-1]["num_updates"]: state for state in map(load_checkpoint, paths)}
    return [states[updates] for updates in sorted(states)[-count:]]


def average_checkpoints(save_dir: Path, count: int) -> Path:
    """Write a checkpoint with the mean parameters of the last `count`; all else in it is from the newest one."""
    average = save_dir / "checkpoint_average.pt"
    if not average.exists():
        states = last_checkpoints(save_dir, count)
        if not states:
            raise RecipeError(f"no checkpoint in {save_dir}: delete it and train again")
        partial = average.with_suffix(".partial")
        torch.save(averaged(states), partial)
        partial.rename(average)
    return average


def averaged(states: list[dict]) -> dict:
    """Return the newest state, with its parameters replaced by the mean over all states."""
    newest = states[-1]
    model = {
        name: mean([state["model"][name] for state in states]) if value.is_floating_point() else value
        for name, value in newest["model"].items()
    }
    return newest | {"model": model}


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors of one dtype, in that dtype; the sum is in double precision, so fp16 loses no bits."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0).to(tensors[0].dtype)


def translate(binary: Path, checkpoint: Path, pieces: str) -> list[str]:
    """Translate the test set with beam 5 into plain text; `pieces` names the subword marks to undo."""
    translation, log = checkpoint.with_suffix(".test.txt"), checkpoint.with_suffix(".generate.log")
    if not translation.exists():
        command = [console_script("fairseq-generate"), str(binary), "--path", str(checkpoint), "--user-dir", USER_DIR]
        command += ["--gen-subset", "test", "--beam", "5", "--max-tokens", "4096", "--remove-bpe", pieces]
        # fairseq leaves out the last sentences if the number of sentences is no multiple of this (by default 8).
        command += ["--required-batch-size-multiple", "1"]
        run_step("translating the test set", command, log)
        write_whole(translation, "\n".join(hypotheses(log)) + "\n")
    return lines(translation)


def hypotheses(log: Path) -> list[str]:
    """Return the translations in the output of fairseq-generate, in the order of the test set (it sorts by length)."""
    rows = (line.split("\t") for line in lines(log) if line.startswith("D-"))
    return [text for _, text in sorted((int(number[2:]), text) for number, _, text in rows)]


def bleu(translations: list[str], references: list[str], metric: BLEU) -> Score:
    """Return the corpus BLEU; raise if the numbers of sentences differ, which sacrebleu would accept."""
    if len(translations) != len(references):
        raise RecipeError(f"{len(translations)} translations for {len(references)} references: nothing to compare")
    score = metric.corpus_score(translations, [references])
    return Score(round(score.score, 2), str(metric.get_signature()))
