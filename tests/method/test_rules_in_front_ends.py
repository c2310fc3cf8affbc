"""A rule of ``recipes/rules`` in the Trainer, fairseq and DeepSpeed: ``FAIRSEQ_ASYNC_PLUGINS`` names its file."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import DEEPSPEED, PACKAGE, ROOT, Processes, command, train_alone
from tests.helpers.hf_runs import train

pytestmark = pytest.mark.usefixtures("recipe_rules")


def versions(run_dir: Path) -> list[int]:
    """After each update of a run whose rounds have two: every second one moves the parameters."""
    return [json.loads(line)["version_after"] for line in (run_dir / "events.jsonl").open()]


def test_the_trainer_has_the_rule_too(tmp_path: Path) -> None:
    train(tmp_path, 2, {"method": "local_sgd", "outer": "isoloco", "outer_lr": 0.5, "local_steps": 3})
    assert versions(tmp_path / "run") == [0, 1, 1, 2, 2, 3, 3, 4]


def test_fairseq_has_the_rule_too(processes: Processes, data: Path, tmp_path: Path) -> None:
    rule = ["--outer", "isoloco", "--outer-lr", 0.5, "--local-steps", 3, "--inner-optimizer", "adam"]
    flags = ["--user-dir", PACKAGE, "--optimizer", "local_sgd", *rule, "--max-update", 12]
    ((code, log),) = train_alone(processes, data, tmp_path, {"run": flags}, seconds=200).values()
    assert code == 0, log
    assert versions(tmp_path / "run") == [1, 2, 3, 4]


def test_deepspeed_has_the_rule_too(processes: Processes, tmp_path: Path) -> None:
    section = {"method": "local_sgd", "outer": "isoloco", "outer_lr": 0.5, "local_steps": 3, "total_steps": 12}
    config = ["--deepspeed_config", ROOT / "deepspeed_config" / "diloco.json"]
    change = ["--change", json.dumps({"async_training": section})]
    line = [command("python"), "-m", "tests.helpers.deepspeed_job", "--out", tmp_path, *config, *change]
    code, output = processes.run(line, seconds=200, **DEEPSPEED)
    assert code == 0, output
    assert versions(tmp_path / "run") == [1, 2, 3, 4]
