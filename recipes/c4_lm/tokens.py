"""Turns documents into files of tokens: learns a vocabulary on the training text, writes each split as a flat array.

The stream of a split is: document, end mark, document, end mark, …; a sequence is `length` consecutive tokens of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.c4_lm.text import SPLITS, TRAIN, Corpus
from recipes.steps import RecipeError, once, write_whole

PAD, BOS, EOS, UNKNOWN = range(4)
LINES = 500_000  # most lines on which the vocabulary is learnt: about 100 MB of C4
BATCH = 256  # documents encoded at a time


@dataclass(frozen=True)
class Counts:
    """The size of a text: tokens with the end marks, words as divided by blanks, bytes of UTF-8."""

    documents: int
    tokens: int
    words: int
    bytes: int


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A data set of sequences: an item is `length` tokens, which are their own labels. A shorter tail is no item."""

    def __init__(self, tokens: np.ndarray, counts: Counts, vocab_size: int, length: int) -> None:
        self.tokens, self.counts, self.vocab_size, self.length = tokens, counts, vocab_size, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        ids = torch.from_numpy(self.tokens[index * self.length : (index + 1) * self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def scored(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of contexts and the tokens to predict: every token of the stream once, the tail included.

        A context begins with the token before its first target; before the stream's first token, that is an end mark.
        """
        full = len(self) * self.length
        for start in range(0, full, batch_size * self.length):
            yield self._pair(start, min(start + batch_size * self.length, full), self.length)
        if tail := len(self.tokens) - full:
            yield self._pair(full, len(self.tokens), tail)

    def _pair(self, start: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        before = self.tokens[start - 1 : start] if start else [EOS]
        stream = torch.from_numpy(np.concatenate([before, self.tokens[start:end]]).astype(np.int64))
        return stream[:-1].view(-1, length), stream[1:].view(-1, length)


@dataclass(frozen=True)
class Prepared:
    """A directory of tokens that `prepare` has made."""

    directory: Path
    meta: dict[str, Any]

    @property
    def tokenizer(self) -> Path:
        """File of the sentencepiece model."""
        return tokenizer_in(self.directory)

    def dataset(self, split: str, length: int) -> PackedDataset:
        """Return the tokens of a split, left on disk until they are used."""
        path, counts = self.directory / f"{split}.tokens", Counts(**self.meta["splits"][split])
        try:
            tokens = np.memmap(path, dtype=self.meta["dtype"], mode="r")
        except (OSError, ValueError) as error:
            raise RecipeError(f"{path} cannot be read ({error}): delete {self.directory}") from None
        if len(tokens) != counts.tokens:
            raise RecipeError(f"{path} has {len(tokens):,} tokens, not {counts.tokens:,}: delete {self.directory}")
        return PackedDataset(tokens, counts, self.meta["vocab_size"], length)


def prepare(corpus: Corpus, vocab: int, out: Path) -> Prepared:
    """Learn the vocabulary and write the tokens of both splits under `out`, unless they are there.

    Tokens of another text or another `--vocab` are refused, not overwritten: a run may be using them.
    """
    request = corpus.source() | {"vocab": vocab}

    def make(directory: Path) -> None:
        learn(corpus, vocab, tokenizer_in(directory))
        processor = load(tokenizer_in(directory))
        dtype = np.dtype(np.uint16 if processor.get_piece_size() <= 1 << 16 else np.int32)
        counts = {split: pack(corpus, split, processor, dtype, directory / f"{split}.tokens") for split in SPLITS}
        meta = {
            "request": request,
            "vocab_size": processor.get_piece_size(),
            "tokenizer": sha(tokenizer_in(directory)),
            "dtype": dtype.name,
            "splits": {split: asdict(each) for split, each in counts.items()},
        }
        write_whole(directory / "meta.json", json.dumps(meta, indent=2) + "\n")

    once(out / "tokens", make)
    prepared = open_prepared(out)
    if prepared.meta["request"] != request:
        raise RecipeError(
            f"{prepared.directory} holds tokens of other text or of another --vocab: delete it or change --out"
        )
    return prepared


def there(out: Path) -> bool:
    """Return whether `prepare` has written tokens under `out`."""
    return (out / "tokens" / "meta.json").exists()


def open_prepared(out: Path) -> Prepared:
    """Return the tokens that `prepare` has written under `out`, whatever text they are of."""
    directory = out / "tokens"
    try:
        return Prepared(directory, json.loads((directory / "meta.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{directory} holds no prepared text ({error})") from None


def learn(corpus: Corpus, size: int, model: Path) -> None:
    """Learn at most `size` pieces on the training text; fewer if the text does not yield that many.

    Nothing is normalised, and characters without a piece are encoded as bytes: tokens can be converted back into the
    text, so that perplexities per word and per byte are of the text itself.
    """
    lines = (line for text in corpus.documents(TRAIN) for line in text.split("\n") if line.strip())
    sample = list(islice(lines, LINES))  # read here, so that our errors of reading are not raised inside sentencepiece
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_prefix=str(model.with_suffix("")),
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 16,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNKNOWN,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().rpartition("] ")[2]
        raise RecipeError(f"--vocab {size}: sentencepiece cannot learn it from this text ({reason})") from None


def tokenizer_in(directory: Path) -> Path:
    """Return the path of a directory's sentencepiece model; checkpoints have it under the same name."""
    return directory / "tokenizer.model"


def load(model: Path) -> sentencepiece.SentencePieceProcessor:
    """Read a sentencepiece model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"{model} cannot be read ({str(error).splitlines()[0]})") from None


def sha(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    return sha256(path.read_bytes()).hexdigest()


def pack(
    corpus: Corpus, split: str, processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype, path: Path
) -> Counts:
    """Write a split as one flat array, with an end mark after each document; return its size."""
    documents = tokens = words = size = 0
    texts = corpus.documents(split)
    with path.open("wb") as file:
        while batch := list(islice(texts, BATCH)):
            for text, ids in zip(batch, processor.encode(batch), strict=True):
                file.write(np.asarray([*ids, EOS], dtype).tobytes())
                documents, tokens = documents + 1, tokens + len(ids) + 1
                words, size = words + len(text.split()), size + len(text.encode())
    if not documents:
        raise RecipeError(f"no {split} text: the corpus is too small, or all of it is in the other split")
    return Counts(documents, tokens, words, size)
