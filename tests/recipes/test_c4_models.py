"""The C4 recipe's models: sizes, checkpoints, perplexity."""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.c4_lm import evaluate, text, tokens
from recipes.c4_lm.models import SIZES, ModelSpec, build, load_model, save_model
from recipes.c4_lm.tokens import Counts, PackedDataset, Prepared
from recipes.steps import RecipeError
from tests.helpers.commands import ROOT

SPEC = ModelSpec("tiny", 320, "sha", sequence_length=32)


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
