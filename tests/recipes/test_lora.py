"""The recipe for adapters: what travels, and what plain PEFT makes of the result."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fairseq_async.export import export
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.run_files import events

JOB = HELPERS / "hf_adapter_job.py"
ENVIRONMENT = {"PYTHONPATH": f"{HELPERS / 'without_fairseq'}:{ROOT}"}
FLAGS = ["--text", ROOT / "LICENSE", "--steps", 6, "--batch", 2, "--length", 32]
MORE = 3  # tokens that are added to the vocabulary


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    before, sys.modules["torchaudio"] = sys.modules.get("torchaudio"), None  # type: ignore[assignment]
    yield pytest.importorskip("peft")
    sys.modules.pop("torchaudio") if before is None else sys.modules.update(torchaudio=before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("base")
    shape = {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def train(base: Path, out: Path, launcher: list[object], *flags: object) -> dict[str, Tensor]:
    """The adapter that worker 0 has saved."""
    with Processes() as processes:
        line = [*launcher, *FLAGS, "--base", base, "--out", out, *flags]
        code, output = processes.run(line, 240, **ENVIRONMENT)
    assert code == 0, output
    return load_file(out / "adapter" / "adapter_model.safetensors")


def launch(workers: int) -> list[object]:
    return [command("fairseq-async"), "launch", "--workers", workers, "--", "python", JOB]


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_worker_trains_the_adapter_that_the_trainer_trains_alone(base: Path, tmp_path: Path) -> None:
    alone = train(base, tmp_path / "alone", [command("python"), JOB, "PLAIN"])
    found = train(base, tmp_path / "one", launch(1), "--method", "hybrid_async")
    assert equal(found, alone) and any(value.any() for name, value in alone.items() if "lora_B" in name)


@pytest.mark.parametrize("compress", ["none", "int8,pull=int8"])
def test_two_workers_exchange_the_adapter_and_plain_peft_loads_it(
    base: Path, tmp_path: Path, peft: Any, compress: str
) -> None:
    """With embeddings of a larger vocabulary, and a norm, that are trained whole."""
    from transformers import GPT2LMHeadModel

    options = f'{{"local_steps": 3, "compress": "{compress}"}}'
    flags = ["--options", options, "--add-tokens", MORE, "--whole", "wte,ln_f"]
    saved = train(base, tmp_path, launch(2), *flags)
    trained = load_file(tmp_path / "run" / "final.safetensors")
    rank, width, tokens = 8, 16, 256 + MORE
    size = 4 * (rank * width + rank * 3 * width + 2 * width + tokens * width)
    assert 4 * sum(value.numel() for value in trained.values()) == size
    sent = {event["bytes_sent"] for event in events(tmp_path / "run")}
    assert sent == {size} if compress == "none" else max(sent) < size / 3

    export(tmp_path / "checkpoint-6", tmp_path / "out")  # which has the new rows of the embeddings that are not trained
    assert equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), saved)
    export(tmp_path / "run", tmp_path / "trained", config=tmp_path / "adapter")
    for adapter in ("adapter", "out", "trained"):
        model = GPT2LMHeadModel.from_pretrained(base)
        model.resize_token_embeddings(tokens)
        loaded = dict(peft.PeftModel.from_pretrained(model, tmp_path / adapter).named_parameters())
        assert all(torch.equal(loaded[name], value) for name, value in trained.items())
