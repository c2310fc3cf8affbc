"""A run's DeepSpeed configuration: the JSON file, with what the flags of train.py add to it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from recipes.steps import RecipeError

SECTION = "async_training"
BATCH_KEYS = ("train_micro_batch_size_per_gpu", "train_batch_size")


def configuration(args: Namespace) -> dict[str, Any]:
    """Return the content of `--deepspeed_config` with the flags put in; `run_dir` is under `--out` unless given."""
    config = read(args.deepspeed_config)
    section = config.setdefault(SECTION, {})
    section.setdefault("run_dir", str(args.out / "async"))
    check_stage(config, args.deepspeed_config)
    set_batch_size(config, args)
    if args.seed is not None:
        section["seed"] = args.seed
    if not isinstance(section.get("seed", 1), int):
        raise RecipeError(f'{args.deepspeed_config}: "seed": {section["seed"]!r} is not a whole number')
    if args.steps is not None:
        set_length(config, args.steps)
    if not section.get("total_steps"):
        raise RecipeError(f'how long? Give --steps N, or "total_steps" in "{SECTION}" of {args.deepspeed_config}')
    return config


def read(path: str | None) -> dict[str, Any]:
    """Read the JSON file; check only that it and its asynchronous section are objects. The plugin checks the rest."""
    if path is None:
        raise RecipeError("give a DeepSpeed configuration: --deepspeed_config FILE, such as those in deepspeed_config/")
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"--deepspeed_config {path} cannot be read ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get(SECTION, {}), dict):
        raise RecipeError(f'--deepspeed_config {path}: not a JSON object with a section "{SECTION}"')
    return config


def check_stage(config: dict[str, Any], path: str) -> None:
    """Raise if each rank would have a part of the parameters alone: a rank saves the model by itself."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        raise RecipeError(f'{path}: "zero_optimization": "stage" 3: the recipe saves whole parameters; give 0, 1 or 2')


def set_batch_size(config: dict[str, Any], args: Namespace) -> None:
    """Set the batch size to that of the flag, or to 8; raise if both file and flag give one."""
    for key in BATCH_KEYS:
        if key in config and args.batch_size is not None:
            raise RecipeError(f'--batch-size {args.batch_size}: {args.deepspeed_config} says "{key}": {config[key]}')
    if not any(key in config for key in BATCH_KEYS):
        config["train_micro_batch_size_per_gpu"] = args.batch_size or 8


def set_length(config: dict[str, Any], steps: int) -> None:
    """Set the run's length, and that of a learning-rate schedule that ends with the run."""
    config[SECTION]["total_steps"] = steps
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
