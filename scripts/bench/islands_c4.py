"""Compares workers of two ranks in DeepSpeed with plain DeepSpeed on four, in bf16: the validation loss on C4.

Two workers of two ranks with `"barrier": true`, beside four ranks of plain DeepSpeed, on the same sequences from the
same seeds, in ZeRO 1 and 3. In bf16 the two sides round different sums, so parameters drift apart: the loss is what can
be compared. Each rank is a process that is forked after DeepSpeed is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import torch
import typer
from deepspeed.runtime.zero import GatheredParameters
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fairseq_async.deepspeed_plugin as deepspeed_async  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from recipes.c4_lm.simulated import C4  # noqa: E402
from recipes.steps import run_main  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

SEEDS, STAGES = (1, 2, 3), (1, 3)
PERCENT = 0.5  # bound of the mean difference of the losses, without its sign
RANKS, ISLAND, BATCH, SEQUENCE, VOCAB = 4, 2, 4, 64, 2000
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "steps_per_print": 2000000000,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 30}},
}


def problem_of(seed: int, data: Path, out: Path) -> C4:
    """Returns the model as it begins, and its data."""
    torch.manual_seed(seed)
    return C4(seed, torch.device("cpu"), data, vocab=VOCAB, out=str(out), sequence=SEQUENCE, validation=256)


def train(config: dict[str, Any], data: Path, seed: int, steps: int, out: Path) -> None:
    """Trains one rank; the first of all leaves the validation loss of the model, in fp32, in the file `out`."""
    problem = problem_of(seed, data, out.parent)
    ours, model = "async_training" in config, problem.model
    initialize: Callable[..., Any] = deepspeed_async.initialize if ours else deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    problem.model = engine
    rank = engine.context.global_rank if ours else distributed.get_rank()
    order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(seed)).tolist()
    for step in range(steps):
        first = (step * RANKS + rank) * BATCH
        engine.backward(problem.loss(problem.batch(order[first : first + BATCH]))[0])
        engine.step()
    with GatheredParameters(list(engine.module.parameters()), enabled=engine.zero_optimization_partition_weights()):
        state = {name: each.detach().float().clone() for name, each in engine.module.state_dict().items()}
    if rank == 0:
        problem = problem_of(seed, data, out.parent)
        problem.model.load_state_dict(state)
        out.write_text(str(problem.evaluate()))


def fork(log: Path, run: Callable[[], object]) -> None:
    """Runs this in a process for each rank, which ends as a script would; returns when all have ended."""
    world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(RANKS):
        if os.fork() == 0:
            os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            torch.set_num_threads(1)
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            run()
            sys.exit()
    for _ in range(RANKS):
        os.wait()


def main(
    data: Annotated[Path, typer.Option(help="Directory of shards of C4.")],
    out: Annotated[Path, typer.Option(help="For tokens and logs.")] = Path("runs/bench"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 150,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Compare the losses over three seeds; exit code 1 if they differ by more than the bound."""
    report = Report(f"Islands of DeepSpeed in bf16: validation loss on C4 after {steps} steps of AdamW")
    jobs.claim(out)
    folder = out / "islands-c4"
    problem_of(1, data, folder)  # prepares the tokens
    for stage in STAGES:
        rows = list[dict[str, Any]]()
        config = CONFIG | {"zero_optimization": {"stage": stage}}
        for seed in SEEDS:
            plain, ours = (folder / f"{name}-{stage}-{seed}" for name in ("plain", "ours"))
            section = {"method": "hybrid_async", "barrier": True, "total_steps": steps, "island_size": ISLAND}
            asynchronous = config | {"async_training": section | {"run_dir": f"{ours}.run"}}
            fork(folder / "log", partial(train, config, data, seed, steps, plain))
            fork(folder / "log", partial(train, asynchronous, data, seed, steps, ours))
            theirs, own = (float(path.read_text()) for path in (plain, ours))
            row = {"seed": seed, "plain": theirs, "workers of two": own, "percent more": 100 * (own / theirs - 1)}
            rows.append(row)
        report.table(f"ZeRO {stage}: workers of {ISLAND} ranks beside {RANKS} ranks of plain DeepSpeed", rows)
        means = [sum(row[name] for row in rows) / len(rows) for name in ("plain", "workers of two")]
        report.bound(f"ZeRO {stage}: percent between the mean losses", abs(100 * (means[1] / means[0] - 1)), PERCENT)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
