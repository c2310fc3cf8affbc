"""Compares outer rules of local SGD in real processes: perplexity, time, waiting, staleness and bytes.

One of the workers is slower than the others. They train `tiny` on C4 from common pretrained parameters; the total
number of local steps is the same for every method. All asynchronous methods have the same scheduling.
`scripts/bench/outer_rules.py` finds the outer learning rate of each, under the simulator's clock.
"""

from __future__ import annotations

import json as jsonlib
import os
import re
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_async.options.addresses import free_port  # noqa: E402
from recipes.c4_lm.models import SEQUENCE  # noqa: E402
from recipes.steps import RecipeError, console_script, run_main, run_step  # noqa: E402
from scripts.bench import bytes_moved, jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

TRAIN = jobs.ROOT / "recipes" / "c4_lm" / "train.py"
METHODS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"outer": "diloco", "outer_lr": 0.7},
    "SGD": {"outer": "sgd", "outer_lr": 2.0},
    "DN": {"outer": "delayed_nesterov", "outer_lr": 0.15},
    "MLA": {"outer": "mla", "outer_lr": 0.3},
}
PRETRAINING = {"outer": "sgd", "outer_lr": 1.0}  # one worker, whose steps are applied unchanged


def configuration(section: dict[str, Any], lr: float, batch: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, the same for all methods except for ``section``."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 2_000_000_000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "warmup_num_steps": 20,
                "total_num_steps": 1,  # --steps sets it
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
        "async_training": {"method": "local_sgd"} | section,
    }


def train(name: str, out: Path, config: dict[str, Any], workers: int, slowdown: str, flags: list[str]) -> float:
    """Makes one run; returns the validation perplexity per token of the server's last parameters."""
    out.mkdir(parents=True, exist_ok=True)
    for left in ("model", "checkpoints", "async"):
        shutil.rmtree(out / left, ignore_errors=True)
    (out / "config.json").write_text(jsonlib.dumps(config, indent=2))
    os.environ["FAIRSEQ_ASYNC_SLOWDOWN"] = slowdown
    launcher = [console_script("deepspeed"), "--num_accelerators", str(workers), "--master_port", str(free_port())]
    script = [str(TRAIN), "--deepspeed", "--deepspeed_config", str(out / "config.json"), "--model", "tiny"]
    log = out / "log.txt"
    run_step(name, [*launcher, *script, "--out", str(out), *flags], log)
    found = re.findall(r"perplexity ([\d.,]+)", log.read_text())
    if not found:
        raise RecipeError(f"no perplexity in {log}")
    return float(found[-1].replace(",", ""))


def prepared(source: Path, out: Path) -> None:
    """Copies the tokens of another run, which saves preparing them again."""
    if not out.exists():
        shutil.copytree(source, out, ignore=shutil.ignore_patterns("model", "checkpoints", "async", "log.txt"))


def measure(out: Path, batch: int) -> dict[str, float]:
    """Returns the figures of a run from the server's events.

    They are seconds of training, total local steps, staleness, share of the time in exchanges, and bytes moved.
    """
    events = [jsonlib.loads(line) for line in (out / "async" / "events.jsonl").open()]
    applied = [event for event in events if event["status"] == "applied"]
    first = min(event["time"] - event["computing_seconds"] for event in applied)
    waiting = sum(event["waiting_seconds"] for event in applied)
    return {
        "seconds": applied[-1]["time"] - first,
        "local steps": sum(event["local_steps"] for event in applied),
        "staleness": mean(event["staleness"] for event in applied),
        "share waiting": waiting / (waiting + sum(event["computing_seconds"] for event in applied)),
    } | bytes_moved.moved(out / "async", batch * SEQUENCE)


def main(
    data: Annotated[Path, typer.Option(help="Directory with C4 shards.", exists=True)],
    out: Annotated[Path, typer.Option(help="For tokens, models and logs.")] = Path("runs/bench/local_sgd"),
    slowdown: Annotated[str, typer.Option(help="A factor for each worker.")] = "1,4",
    steps: Annotated[int, typer.Option(min=1, help="Mean local steps of a worker.")] = 300,
    pretraining: Annotated[int, typer.Option(min=1, help="Steps before, by one worker.")] = 300,
    local_steps: Annotated[int, typer.Option(min=1, help="H.")] = 20,
    grace: Annotated[float, typer.Option(min=0, help="Grace period of all but DiLoCo, seconds; 0 for none.")] = 0.0,
    dynamic: Annotated[bool, typer.Option(help="Dynamic local steps of all but DiLoCo.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a local step.")] = 4,
    vocab: Annotated[int, typer.Option(min=300, help="Pieces of the vocabulary.")] = 4000,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 1 to this number.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare outer rules with a slow worker."""
    report = Report(f"Local SGD: tiny on {data.name}, slowdown {slowdown}, H = {local_steps}, {steps} steps a worker")
    workers = len(slowdown.split(","))
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        common = ["--data", str(data), "--vocab", str(vocab), "--seed", str(seed)]
        start = out / f"pretrained-{seed}"
        before = configuration(PRETRAINING | {"local_steps": local_steps}, 3e-3, batch)
        at_start = train(f"pretraining, seed {seed}", start, before, 1, "1", [*common, "--steps", str(pretraining)])
        rows.append({"method": "pretrained", "seed": seed, "perplexity": at_start} | dict.fromkeys(KEYS))
        for name, method in METHODS.items():
            directory = out / f"{name.lower().replace(' ', '')}-{seed}"
            prepared(start, directory)
            section = {"local_steps": local_steps} | method
            if name != "DiLoCo":
                section |= {"dynamic_local_steps": dynamic} | ({"grace_period": grace} if grace else {})
            flags = [*common, "--steps", str(steps), "--init", str(start / "model")]
            score = train(
                f"{name}, seed {seed}", directory, configuration(section, 1e-3, batch), workers, slowdown, flags
            )
            rows.append({"method": name, "seed": seed, "perplexity": score} | measure(directory, batch))
    report.table("runs", rows)
    report.end(json)


KEYS = ("seconds", "local steps", "staleness", "share waiting", "bytes per token", "bytes per token, synchronous")


if __name__ == "__main__":
    run_main(main)
