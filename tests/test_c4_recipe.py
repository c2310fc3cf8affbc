"""The C4 recipe: reading documents, packing tokens, counting parameters, scoring a model, and a short training."""

import gzip
import json
import math
import re
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from recipes.c4_lm import corpus_made_up, evaluate, settings, text, tokens
from recipes.c4_lm.models import SIZES, ModelSpec, build, load_model, save_model
from recipes.c4_lm.tokens import Counts, PackedDataset, Prepared
from recipes.steps import RecipeError, once
from tests.conftest import DEEPSPEED, ROOT, Processes

SAMPLE = ROOT.parent / "shared" / "data" / "c4"
WORDS = "the cat saw a dog under that old tree while rain fell on roofs and nobody came".split()
TRAIN_TEXT = [f"{' '.join(WORDS[i % 7 :])}.\nStory {i} ends: {' '.join(WORDS[: i % 11 + 1])}." for i in range(300)]
VALIDATION_TEXT = [f"Another {' '.join(WORDS[i % 5 : 9])}, número {i} – 東京." for i in range(40)]


def write(path: Path, texts: Iterable[str]) -> Path:
    """A shard of JSON lines, packed where its name says so."""
    lines = "".join(json.dumps({"text": each, "url": "u"}, ensure_ascii=False) + "\n" for each in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write(directory / "c4-train.00000-of-00002.json.gz", TRAIN_TEXT[:200])
    write(directory / "c4-train.00001-of-00002.jsonl", TRAIN_TEXT[200:])
    write(directory / "c4-validation.00000-of-00001.json.gz", VALIDATION_TEXT)
    return directory


@pytest.fixture(scope="module")
def prepared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tokens.prepare(text.find(data), 320, tmp_path_factory.mktemp("out"))


def refused(data: Path) -> str:
    """The one line with which reading all of a corpus ends."""
    with pytest.raises(RecipeError) as error:
        corpus = text.find(data)
        for split in text.SPLITS:
            list(corpus.documents(split))
    message = str(error.value)
    assert "\n" not in message
    return message


# Reading


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


# Tokens


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


# Models


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "parameters", "about"),
    [
        ("tiny", 2, 128, 4, 1_419_904, 1.5e6),
        ("20m", 6, 256, 4, 21_130_496, 20e6),
        ("60m", 3, 896, 16, 58_977_408, 60e6),
        ("150m", 12, 896, 16, 149_890_944, 150e6),
    ],
)
def test_a_model_is_as_large_as_its_name_says(
    name: str, layers: int, hidden: int, heads: int, parameters: int, about: float
) -> None:
    with torch.device("meta"):
        model = build(ModelSpec(name, SIZES[name].vocab, ""))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parameters == pytest.approx(about, rel=0.06)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (layers, hidden, heads)
    assert (config.vocab_size, config.max_position_embeddings) == (8_000 if name == "tiny" else 32_000, 256)
    assert (config.attention_dropout, config.use_cache) == (0.0, False)


SPEC = ModelSpec("tiny", 320, "sha", sequence_length=32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=1, tied=tied))
    model = build(SPEC)
    save_model(model, SPEC, tmp_path)
    again, spec = load_model(tmp_path)
    assert spec == SPEC
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    size = (tmp_path / "model.pt").stat().st_size
    assert size < 4 * sum(p.numel() for p in model.parameters()) * 1.1  # nothing is in it twice
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


def test_a_saved_view_does_not_take_along_what_it_views(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(torch.randn(100_000)[:16].view(4, 4))
    save_model(model, SPEC, tmp_path)
    assert (tmp_path / "model.pt").stat().st_size < 10_000


def test_what_is_no_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(RecipeError) as error:
            load_model(tmp_path)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message() == f"{tmp_path} is no checkpoint of this recipe: there is no model.json in it"
    (tmp_path / "model.json").write_text("{")
    assert "model.json does not describe a model" in message()
    (tmp_path / "model.json").write_text('{"model": "7b", "vocab_size": 320, "tokenizer": ""}')
    assert "no model is called '7b'; there are tiny, 20m, 60m, 150m" in message()
    save_model(build(SPEC), replace(SPEC, vocab_size=500), tmp_path)
    assert "model.pt does not hold a tiny model of 500 tokens: " in message()
    (tmp_path / "model.pt").write_bytes(b"not torch's")
    assert "model.pt does not hold a tiny model" in message()


# Perplexity


def packed(stream: Sequence[int], length: int, vocab_size: int = 320) -> PackedDataset:
    return PackedDataset(np.asarray(stream, np.uint16), Counts(1, len(stream), 7, 31), vocab_size, length)


def test_every_token_is_a_target_once_and_its_context_is_what_comes_before_it() -> None:
    stream = list(range(10, 21))
    pairs = [(c.tolist(), t.tolist()) for c, t in packed(stream, 4).scored(batch_size=2)]
    assert pairs == [
        ([[tokens.EOS, 10, 11, 12], [13, 14, 15, 16]], [[10, 11, 12, 13], [14, 15, 16, 17]]),
        ([[17, 18, 19]], [[18, 19, 20]]),
    ]


@pytest.mark.parametrize("count", [3, 31, 32, 33, 150])
def test_perplexity_is_that_of_a_sum_in_double_precision_over_single_tokens(count: int) -> None:
    torch.manual_seed(0)
    model = build(SPEC)
    stream = torch.randint(320, (count,)).tolist()
    score = evaluate.perplexity(model, packed(stream, 32), 3, torch.device("cpu"))

    double, nll = build(SPEC).double().eval(), 0.0
    double.load_state_dict(model.state_dict())
    for index, token in enumerate(stream):
        begin = index // 32 * 32
        context = [tokens.EOS, *stream][begin : index + 1]
        logits = double(input_ids=torch.tensor([context])).logits[0, -1]
        nll += (logits.logsumexp(0) - logits[token]).item()
    assert score.nll == pytest.approx(nll, rel=1e-5)
    assert (score.tokens, score.words, score.bytes) == (count, 7, 31)
    assert score.per_token == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert score.per_word == pytest.approx(math.exp(nll / 7), rel=1e-3)
    assert score.per_byte == pytest.approx(math.exp(nll / 31), rel=1e-3)
    assert model.training


def test_perplexity_does_not_depend_on_the_batch_size(prepared: Prepared) -> None:
    model, dataset = build(SPEC), prepared.dataset("validation", 32)
    scores = [evaluate.perplexity(model, dataset, size, torch.device("cpu")) for size in (1, 5, 64)]
    assert scores[0].tokens == len(dataset.tokens)
    assert scores[1].nll == pytest.approx(scores[0].nll) and scores[2].nll == pytest.approx(scores[0].nll)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(RecipeError, match="^the text has tokens up to 499, the model only up to 319$"):
        evaluate.perplexity(build(SPEC), packed([1], 32, vocab_size=500), 1, torch.device("cpu"))


@pytest.fixture
def checkpoint(prepared: Prepared, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    save_model(build(SPEC), replace(SPEC, tokenizer=prepared.meta["tokenizer"]), directory)
    tokens.tokenizer_in(directory).write_bytes(prepared.tokenizer.read_bytes())
    return directory


def test_fresh_and_prepared_text_score_the_same(
    checkpoint: Path, prepared: Prepared, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main(checkpoint, data, None, 8)
    evaluate.main(checkpoint, data, prepared.directory.parent, 8)
    evaluate.main(checkpoint, None, prepared.directory.parent, 8)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second == third
    counts = prepared.dataset("validation", 32).counts
    assert first.endswith(f"per byte over {counts.tokens:,} tokens, {counts.words:,} words, {counts.bytes:,} bytes")


def test_another_vocabulary_than_the_checkpoints_is_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    other = tokens.prepare(text.find(data), 310, tmp_path / "out")
    with pytest.raises(RecipeError, match=r"has another vocabulary \(310 pieces\) than the checkpoint \(320\)"):
        evaluate.main(checkpoint, None, other.directory.parent, 8)
    tokens.tokenizer_in(checkpoint).write_bytes(other.tokenizer.read_bytes())
    with pytest.raises(RecipeError, match=r"tokenizer.model \(310 pieces\) is not what the model \(320\) was trained"):
        evaluate.main(checkpoint, data, None, 8)


def test_the_command_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "recipes" / "c4_lm" / "evaluate.py", tmp_path / "none", "--data", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"{tmp_path / 'none'} is no checkpoint of this recipe: there is no model.json in it\n"


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


# Training


def settings_of(config: dict[str, Any], path: Path, **flags: Any) -> dict[str, Any]:
    path.write_text(json.dumps(config))
    given = {"steps": None, "seed": None, "batch_size": None, "out": path.parent, "deepspeed_config": str(path)} | flags
    return settings.configuration(Namespace(**given))


def test_flags_are_put_into_the_configuration(tmp_path: Path) -> None:
    path, schedule = tmp_path / "c.json", {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    config = settings_of({"scheduler": schedule}, path, steps=70, seed=3, batch_size=4)
    assert config["async_training"] == {"total_steps": 70, "seed": 3, "run_dir": str(tmp_path / "async")}
    assert config["scheduler"]["params"]["total_num_steps"] == 70
    assert config["train_micro_batch_size_per_gpu"] == 4
    kept = {"train_batch_size": 2, "async_training": {"total_steps": 5, "run_dir": "x"}}
    assert settings_of(kept, path) == kept


def test_a_configuration_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for config, flags, reason in (
        ({}, {}, 'how long? Give --steps N, or "total_steps"'),
        ({"train_batch_size": 8}, {"batch_size": 4, "steps": 1}, f'--batch-size 4: {path} says "train_batch_size": 8'),
        ([], {}, "not a JSON object"),
        ({"async_training": {"seed": "one"}}, {"steps": 1}, "\"seed\": 'one' is not a whole number"),
        ({}, {"deepspeed_config": None}, "give a DeepSpeed configuration"),
        ({}, {"deepspeed_config": str(tmp_path / "none.json")}, "none.json cannot be read"),
    ):
        with pytest.raises(RecipeError, match=re.escape(reason)):
            settings_of(config, path, **flags)


Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(data: Path, tmp_path: Path, processes: Processes) -> Train:
    """A run of one worker, as a launcher would start it."""
    recipe = ROOT / "recipes" / "c4_lm"
    command = [sys.executable, recipe / "train.py", "--deepspeed_config", recipe / "demo.json", "--model", "tiny"]
    command += ["--data", data, "--out", tmp_path, "--vocab", "320", "--steps", "20"]

    def run(*flags: str) -> tuple[int, str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        return processes.run([*command, *flags], 250, **DEEPSPEED, **ranks)

    return run


def test_a_run_learns_saves_and_goes_on(train: Train, tmp_path: Path) -> None:
    code, output = train()
    assert code == 0, output
    (score,) = re.findall(r"^20 of 20 steps: (perplexity ([\d.]+) per token, .*)", output, re.MULTILINE)
    assert float(score[1]) < 160  # a model that has learnt nothing is at the size of the vocabulary, 320
    model, spec = load_model(tmp_path / "model")
    dataset = tokens.open_prepared(tmp_path).dataset("validation", spec.sequence_length)
    assert str(evaluate.perplexity(model, dataset, 8, torch.device("cpu"))) == score[0]

    code, output = train("--resume")
    assert code == 0 and f"20 of 20 steps: {score[0]}" in output, output


def test_a_run_refuses_a_directory_with_another_run(train: Train, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    code, output = train()
    assert code == 2 and "Traceback" not in output
    assert f"error: --out {tmp_path} holds a run: go on with it by --resume, or change --out\n" in output
