"""A DeepSpeed script of two ranks that trains one case after the other, since its start takes longest.

``deepspeed --num_accelerators 2 deepspeed_ranks.py CASES.json``: a case is {"name", "config", "save_at", "load",
"only", "weights", "nan", "differ", "sparse", "by_hand", "from"}. What a rank has seen and come to is NAME-RANK.pt
beside the file of cases; an error, its one line.
"""

import argparse
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch.utils.data import TensorDataset

import fairseq_async.deepspeed_plugin as deepspeed_async


def data() -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Bag(nn.Module):
    """A network of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(4, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x[:, 0] > 0).long())


def train(case: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    groups.mpu = None  # DeepSpeed keeps the last engine's
    model, nan = Bag() if case.get("sparse") else network(), case.get("nan")
    if case.get("differ"):
        model[2].bias.data.add_(rank)
    engine, _, loader, _ = deepspeed_async.initialize(
        model=model,
        model_parameters=list(model.parameters())[case.get("from", 0) :],
        training_data=data(),
        config=case["config"],
    )
    if "load" in case:
        what = {"load_module_only": case.get("only", False), "load_optimizer_states": not case.get("weights")}
        engine.load_checkpoint(str(folder / case["load"]), **what)
    dtype, drawn, seen = next(engine.module.parameters()).dtype, [], []
    for x, y in loader:
        drawn.append((x, y))
        loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        engine.backward(loss * (float("nan") if len(drawn) == nan and rank == 1 else 1.0))
        before = engine.global_steps
        if case.get("by_hand"):
            engine.optimizer.step()
        engine.step()
        if engine.global_steps > before:
            adascale = getattr(engine, "adascale", None)
            gain, applied = adascale.gain if adascale else 1.0, engine.was_step_applied()
            seen.append({"loss": loss.item(), "rate": engine.get_lr()[0], "gain": gain, "applied": applied})
        if engine.global_steps == case.get("save_at") and engine.global_steps > before:
            engine.save_checkpoint(str(folder / case["name"]))
    return {
        "model": {name: value.float() for name, value in engine.module.state_dict().items()},
        "drawn": drawn,
        "seen": seen,
        "progress": float(engine.progress),
        "skipped": engine.skipped_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--local_rank", type=int, default=0)
    path = parser.parse_args().cases
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads(path.read_text()):
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                result = train(case, rank, path.parent)
        except SystemExit:
            result = {"error": errors.getvalue()}
        torch.save(result, path.parent / f"{case['name']}-{rank}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
