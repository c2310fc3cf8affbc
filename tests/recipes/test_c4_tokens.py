"""The C4 recipe's tokens: a vocabulary, packed sequences, counts."""

import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch

from recipes.c4_lm import text, tokens
from recipes.c4_lm.tokens import Counts, Prepared
from recipes.steps import RecipeError
from tests.helpers.c4_text import TRAIN_TEXT, VALIDATION_TEXT, write


def test_the_tokens_are_the_documents_with_an_end_mark_after_each(prepared: Prepared) -> None:
    processor = tokens.load(prepared.tokenizer)
    for split, documents in (("train", TRAIN_TEXT), ("validation", VALIDATION_TEXT)):
        stream = prepared.dataset(split, 256).tokens.tolist()
        assert stream == list(chain.from_iterable([*processor.encode(d), tokens.EOS] for d in documents))
        assert [processor.decode(processor.encode(d)) for d in documents] == documents  # byte for byte


def test_the_counts_are_those_of_the_text(prepared: Prepared) -> None:
    for split, documents in (("train", TRAIN_TEXT), ("validation", VALIDATION_TEXT)):
        dataset = prepared.dataset(split, 256)
        words, size = sum(len(d.split()) for d in documents), sum(len(d.encode()) for d in documents)
        assert dataset.counts == Counts(len(documents), len(dataset.tokens), words, size)


def test_the_vocabulary_knows_nothing_of_the_validation_text(prepared: Prepared) -> None:
    processor = tokens.load(prepared.tokenizer)
    assert processor.piece_to_id("東") == tokens.UNKNOWN  # spelt in bytes, since no training document has it
    ids = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
    assert ids == (tokens.PAD, tokens.BOS, tokens.EOS, tokens.UNKNOWN)


def test_a_text_too_small_for_the_vocabulary_gets_a_smaller_one(prepared: Prepared, tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.jsonl", TRAIN_TEXT[:20])
    write(tmp_path / "data" / "valid.jsonl", VALIDATION_TEXT)
    small = tokens.prepare(text.find(tmp_path / "data"), 32_000, tmp_path / "out")
    assert small.meta["vocab_size"] < 1000
    assert prepared.meta["vocab_size"] == 320
    with pytest.raises(RecipeError, match=r"^--vocab 50: .*Vocabulary size is smaller than required_chars"):
        tokens.prepare(text.find(tmp_path / "data"), 50, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


def test_items_are_sequences_that_are_their_own_labels(prepared: Prepared) -> None:
    dataset = prepared.dataset("train", 256)
    assert len(dataset) == len(dataset.tokens) // 256 > 4
    item = dataset[3]
    assert item["input_ids"].dtype == torch.int64
    assert item["input_ids"].tolist() == item["labels"].tolist() == dataset.tokens[3 * 256 : 4 * 256].tolist()
    assert len(list(dataset)) == len(dataset)


def test_prepared_tokens_are_used_again_for_the_same_text_only(data: Path, tmp_path: Path) -> None:
    first = tokens.prepare(text.find(data), 320, tmp_path)
    stamp = (first.directory / "train.tokens").stat().st_mtime_ns
    assert tokens.prepare(text.find(data), 320, tmp_path) == first
    assert (first.directory / "train.tokens").stat().st_mtime_ns == stamp
    copied = Path(shutil.copytree(data, tmp_path / "copied", copy_function=shutil.copyfile))  # at another time
    assert tokens.prepare(text.find(copied), 320, tmp_path) == first
    write(tmp_path / "other" / "c4-train.jsonl", TRAIN_TEXT)
    for corpus, vocab in ((text.find(data), 321), (text.find(data, 100), 320), (text.find(tmp_path / "other"), 320)):
        with pytest.raises(RecipeError, match="holds tokens of other text or of another --vocab: delete it"):
            tokens.prepare(corpus, vocab, tmp_path)


def test_a_broken_preparation_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", TRAIN_TEXT)
    (tmp_path / "data" / "b.jsonl").write_text("no JSON\n")
    with pytest.raises(RecipeError, match="b.jsonl, line 1"):
        tokens.prepare(text.find(tmp_path / "data"), 320, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_file_of_tokens_that_was_cut_off_is_noticed(data: Path, tmp_path: Path) -> None:
    made = tokens.prepare(text.find(data), 320, tmp_path)
    path = made.directory / "validation.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RecipeError, match=r"validation.tokens has [\d,]+ tokens, not [\d,]+: delete"):
        made.dataset("validation", 256)
