"""The C4 recipe's training: its configuration, and a short run of one worker."""

import json
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.c4_lm import evaluate, settings, tokens
from recipes.c4_lm.models import load_model
from recipes.steps import RecipeError
from tests.helpers.commands import DEEPSPEED, ROOT, Processes


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
        (
            {"zero_optimization": {"stage": 3}},
            {"steps": 1},
            f'{path}: "zero_optimization": "stage" 3: the recipe saves',
        ),
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
