"""A user's DeepSpeed script, small: a perceptron learns a fixed function. Leaves parameters and losses in --out."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import nn
from torch.utils.data import TensorDataset

import fairseq_async.deepspeed_plugin as deepspeed_async
from tests.helpers.anchored import Anchored


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """The file's, with what a test changes of it."""
    config: dict[str, Any] = json.loads(Path(args.deepspeed_config).read_text())
    changes = json.loads(args.change)
    config["async_training"] |= {"run_dir": str(args.out / "run")} | changes.pop("async_training", {})
    return config | changes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--load", default="")
    parser.add_argument("--load-weights", help="a checkpoint to load as one of plain DeepSpeed, without its optimizer")
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--spoil", type=int, default=-1, help="number of a batch whose loss is NaN")
    parser.add_argument("--copying", action="store_true", help="give an optimizer that has copies of parameters")
    parser.add_argument("--change", default="{}", help="JSON that is laid over the configuration")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    config, args.deepspeed_config = configuration(args), None

    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = Anchored(model.parameters(), **config.pop("optimizer")["params"]) if args.copying else None
    engine, _, loader, _ = deepspeed_async.initialize(
        args, model, optimizer, model.parameters(), training_data=data, config=config
    )
    if args.load:
        engine.load_checkpoint(args.load)
    if args.load_weights:
        unknown = shutil.ignore_patterns("async_*")
        plain = shutil.copytree(args.load_weights, args.out / "plain", ignore=unknown)
        engine.load_checkpoint(str(plain), load_optimizer_states=False)
    dtype = next(engine.module.parameters()).dtype
    losses, rates, drawn, applied = [], [], [], []
    for x, y in loader:
        rates.append(engine.get_lr()[0])
        drawn += x[:, 0].tolist()
        loss = nn.functional.mse_loss(engine(x.to(engine.device, dtype)), y.to(engine.device, dtype))
        engine.backward(loss * float("nan") if len(losses) == args.spoil else loss)
        engine.step()
        losses.append(loss.item())
        applied.append(engine.was_step_applied())
        if len(losses) == args.save_at:
            engine.save_checkpoint(str(args.out / "checkpoint"))
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"worker-{engine.worker}-{engine.context.rank}"
    with GatheredParameters(list(engine.module.parameters()), enabled=engine.zero_optimization_partition_weights()):
        torch.save(engine.module.state_dict(), args.out / f"{name}.pt")
    summary = {"losses": losses, "rates": rates, "drawn": drawn, "progress": engine.progress}
    summary |= {"skipped": engine.skipped_steps, "applied": applied}
    (args.out / f"{name}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
