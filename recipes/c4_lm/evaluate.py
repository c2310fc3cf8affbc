"""Scores a checkpoint of this recipe on validation text: perplexity per token, per word and per byte."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.c4_lm import text, tokens  # noqa: E402
from recipes.c4_lm.llama import LlamaForCausalLM  # noqa: E402
from recipes.c4_lm.models import ModelSpec, load_model  # noqa: E402
from recipes.c4_lm.tokens import PackedDataset  # noqa: E402
from recipes.steps import RecipeError, run_main  # noqa: E402


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood of a text in nats, and the size of the text.

    The perplexities per word and per byte compare models of different vocabularies: the likelihood is that of the whole
    text, end marks included, however it was cut into tokens.
    """

    nll: float
    tokens: int
    words: int
    bytes: int

    @property
    def per_token(self) -> float:
        return exp(self.nll / self.tokens)

    @property
    def per_word(self) -> float:
        return exp(self.nll / self.words)

    @property
    def per_byte(self) -> float:
        return exp(self.nll / self.bytes)

    def __str__(self) -> str:
        means = f"{self.per_token:,.2f} per token, {self.per_word:,.2f} per word, {self.per_byte:.4f} per byte"
        return f"perplexity {means} over {self.tokens:,} tokens, {self.words:,} words, {self.bytes:,} bytes"


def exp(value: float) -> float:
    """Return e to the power `value`; infinity where that is too large."""
    return math.exp(value) if value < 700 else math.inf


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, dataset: PackedDataset, batch_size: int, device: torch.device) -> Perplexity:
    """Score the whole data set, each token once, with up to `dataset.length` tokens of context."""
    if dataset.vocab_size > (size := model.config.vocab_size):
        raise RecipeError(f"the text has tokens up to {dataset.vocab_size - 1}, the model only up to {size - 1}")
    training, nll, scored = model.training, 0.0, 0
    model.eval()
    for contexts, targets in dataset.scored(batch_size):
        logits = model(input_ids=contexts.to(device)).logits
        losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(device), reduction="none")
        nll += losses.double().sum().item()
        scored += targets.numel()
    model.train(training)
    return Perplexity(nll, scored, dataset.counts.words, dataset.counts.bytes)


def prepared_text(out: Path, data: Path | None, spec: ModelSpec) -> PackedDataset:
    """Return the validation tokens in the `--out` of a training run; raise if `data` or the vocabulary differs."""
    prepared = tokens.open_prepared(out)
    if data is not None and prepared.meta["request"]["files"] != text.find(data).source()["files"]:
        raise RecipeError(f"--out {out} holds the tokens of other text than --data {data}: leave out one of them")
    if prepared.meta["tokenizer"] != spec.tokenizer:
        theirs, ours = prepared.meta["vocab_size"], spec.vocab_size
        raise RecipeError(f"--out {out} has another vocabulary ({theirs:,} pieces) than the checkpoint ({ours:,})")
    return prepared.dataset(text.VALIDATION, spec.sequence_length)


def fresh_text(data: Path, checkpoint: Path, spec: ModelSpec, directory: Path) -> PackedDataset:
    """Return the validation documents of `--data`, tokenised with the checkpoint's own vocabulary."""
    model = tokens.tokenizer_in(checkpoint)
    processor = tokens.load(model)
    if tokens.sha(model) != spec.tokenizer or processor.get_piece_size() != spec.vocab_size:
        pieces = processor.get_piece_size()
        raise RecipeError(f"{model} ({pieces:,} pieces) is not what the model ({spec.vocab_size:,}) was trained with")
    path = directory / "validation.tokens"
    counts = tokens.pack(text.find(data), text.VALIDATION, processor, np.dtype(np.int32), path)
    return PackedDataset(np.fromfile(path, np.int32), counts, spec.vocab_size, spec.sequence_length)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Directory with model.pt and model.json, as train.py saves it.")],
    data: Annotated[Path | None, typer.Option(help="Directory of shards; their validation text is scored.")] = None,
    out: Annotated[Path | None, typer.Option(help="Score the tokens prepared in this --out of train.py.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
) -> None:
    """Print a model's perplexity on validation text, every token of it scored once."""
    if data is None and out is None:
        raise RecipeError("give the text to score: --data DIR with shards, or --out DIR of a training run")
    model, spec = load_model(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with TemporaryDirectory() as directory:
        if out is not None:
            dataset = prepared_text(out, data, spec)
        else:
            assert data is not None
            dataset = fresh_text(data, checkpoint, spec, Path(directory))
        model.to(device)  # type: ignore[arg-type]  # transformers decorates Module.to out of its types
        print(perplexity(model, dataset, batch_size, device))


if __name__ == "__main__":
    run_main(main)
