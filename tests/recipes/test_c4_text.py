"""The documents of the C4 recipe: reading shards, splitting, streaming, making up."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from recipes.c4_lm import corpus_made_up, text
from recipes.steps import RecipeError, once
from tests.helpers.c4_text import TRAIN_TEXT, VALIDATION_TEXT, write
from tests.helpers.commands import ROOT

SAMPLE = ROOT.parent / "shared" / "data" / "c4"


def refused(data: Path) -> str:
    """The one line with which reading all of a corpus ends."""
    with pytest.raises(RecipeError) as error:
        corpus = text.find(data)
        for split in text.SPLITS:
            list(corpus.documents(split))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_documents_come_from_json_lines_gzip_and_parquet(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "  \n", "two"])
    write(tmp_path / "b.json.gz", ["three\u2028still three"])
    parquet.write_table(pyarrow.table({"url": ["u"] * 2, "text": ["four", "five"]}), tmp_path / "c.parquet")
    write(tmp_path / "My-Validation.jsonl", ["six"])
    (tmp_path / "README.md").write_text("not a shard")
    corpus = text.find(tmp_path)
    assert list(corpus.documents("train")) == ["one", "two", "three\u2028still three", "four", "five"]
    assert list(corpus.documents("validation")) == ["six"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    shard = write(tmp_path / "train.jsonl", ["fine", "fine"])
    shard.write_bytes(shard.read_bytes() + b'{"text": "cut o')
    assert refused(tmp_path).startswith(f"{shard}, line 3: not JSON")


def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    assert "line 1: not JSON ('utf-8' codec" in refused(tmp_path)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"content": "x"}', 'no "text" in this record'),
        ('{"text": ["x"]}', '"text" is not a string'),
        ('"x"', "not a JSON object"),
        ('{"text": "\\ud800"}', "half a character"),
    ],
)
def test_a_record_without_a_usable_text_is_named(tmp_path: Path, record: str, reason: str) -> None:
    shard = tmp_path / "train.jsonl"
    shard.write_text('{"text": "fine"}\n' + record + "\n")
    message = refused(tmp_path)
    assert message.startswith(f"{shard}, line 2: ") and reason in message


def test_a_gzip_that_is_cut_off_or_none_is_named(tmp_path: Path) -> None:
    shard = write(tmp_path / "train.jsonl.gz", TRAIN_TEXT)
    shard.write_bytes(shard.read_bytes()[:-30])
    message = refused(tmp_path)
    assert message.startswith(f"{shard}, after line ") and "cut off" in message
    shard.write_text('{"text": "not packed"}\n')
    assert refused(tmp_path).startswith(f"{shard}, after line 0: broken")


def test_a_broken_parquet_file_and_one_without_text_are_named(tmp_path: Path) -> None:
    shard = tmp_path / "train.parquet"
    shard.write_bytes(b"PAR1 and no more")
    assert refused(tmp_path).startswith(f"{shard}, after row 0: broken")
    parquet.write_table(pyarrow.table({"content": ["x"]}), shard)
    assert refused(tmp_path) == f'{shard}: no column "text" in it (its columns: content)'
    parquet.write_table(pyarrow.table({"text": ["x", None]}), shard)
    assert refused(tmp_path) == f'{shard}, row 2: no "text" in this record'


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_an_empty_shard_is_named(tmp_path: Path, name: str) -> None:
    shard = write(tmp_path / name, [])
    assert refused(tmp_path) == f"{shard}: no documents in it"


def test_directories_that_cannot_do_say_what_is_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"--data {tmp_path / 'nowhere'}: there is no such directory"
    assert "no shards there; needed are training files ending in .jsonl" in refused(tmp_path)
    write(tmp_path / "validation.jsonl", ["x"])
    assert "only validation files there" in refused(tmp_path)


# Splits


def test_a_validation_document_is_never_a_training_document(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [*TRAIN_TEXT, VALIDATION_TEXT[3], VALIDATION_TEXT[4] + "\n"])
    write(tmp_path / "valid.jsonl", VALIDATION_TEXT)
    corpus = text.find(tmp_path)
    assert list(corpus.documents("validation")) == VALIDATION_TEXT
    assert list(corpus.documents("train")) == TRAIN_TEXT


def test_without_a_validation_file_whole_documents_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TRAIN_TEXT)
    write(tmp_path / "b.jsonl", TRAIN_TEXT)  # copies, which must all be on one side
    corpus = text.find(tmp_path)
    train, validation = (list(corpus.documents(split)) for split in text.SPLITS)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(TRAIN_TEXT * 2)
    assert 0 < len(validation) < len(train) / 10


def test_a_limit_takes_the_first_documents_and_a_tenth_as_many_for_validation(data: Path) -> None:
    corpus = text.find(data, limit=30)
    assert list(corpus.documents("train")) == TRAIN_TEXT[:30]
    assert list(corpus.documents("validation")) == VALIDATION_TEXT[:3]


# C4 over the network


def test_of_two_programs_that_prepare_the_same_at_once_the_second_uses_what_the_first_has_made(tmp_path: Path) -> None:
    def make(directory: Path) -> None:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "by").write_text("the other")
        (directory / "by").write_text("this one")

    assert (once(tmp_path / "made", make) / "by").read_text() == "the other"
    assert list(tmp_path.iterdir()) == [tmp_path / "made"]


def test_c4_is_streamed_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "c4", lambda split: ({"text": f"{split} {i}", "url": "u"} for i in range(1000)))
    directory = text.stream(tmp_path, 20)
    monkeypatch.setattr(text, "c4", None)
    assert text.stream(tmp_path, 20) == directory
    corpus = text.find(directory)
    assert list(corpus.documents("train")) == [f"train {i}" for i in range(20)]
    assert list(corpus.documents("validation")) == ["validation 0", "validation 1"]


def test_without_a_network_one_line_asks_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(split: str) -> None:
        raise ConnectionError("Couldn't reach it\nand more lines")

    monkeypatch.setattr(text, "c4", unreachable)
    with pytest.raises(RecipeError, match=r"^cannot fetch allenai/c4 \(Couldn't reach it\): give .* with --data$"):
        text.stream(tmp_path, 20)
    assert not list(tmp_path.iterdir())


# Corpora


def test_the_made_up_corpus_has_documents_with_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_made_up, "SIZES", {"train": 200, "validation": 20})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        corpus_made_up.make_corpus(tmp_path / name)
    corpus, again = text.find(tmp_path / "one"), text.find(tmp_path / "two")
    train = list(corpus.documents("train"))
    assert train == list(again.documents("train"))
    assert len(set(train)) == 200 and not set(train) & set(corpus.documents("validation"))
    distinct = [len(set(document.split())) / len(document.split()) for document in train]
    mixed = [word for document in train for word in document.split()][:: len(train)]
    assert sum(distinct) / len(distinct) < len(set(mixed)) / len(mixed) - 0.1  # words come back within a document


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample of C4 is not here")
def test_the_sample_of_c4_can_be_read_and_its_splits_are_disjoint() -> None:
    corpus = text.find(SAMPLE)
    train, validation = (list(corpus.documents(split)) for split in text.SPLITS)
    assert (len(train), len(validation)) == (4_476, 999)
    assert not {d.strip() for d in train} & {d.strip() for d in validation}
