"""A user's DeepSpeed script with a data loader of its own, which ends by its own count.

Usage: deepspeed_user.py WHAT OUT, under DeepSpeed's launcher. WHAT is one of:
    same     every worker draws the same data, and the loop just ends
    divided  each worker draws its part, and ``engine.end()`` comes after the loop
    hybrid   likewise, with gradients
    crash    rank 0 raises an error of the script's own in the middle
    early    ``deepspeed.init_distributed`` is called before ``initialize``
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fairseq_async.deepspeed_plugin as deepspeed_async


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("out", type=Path)
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    if args.what == "early":
        deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "async_training": {"local_steps": 3, "outer": "nesterov", "run_dir": str(args.out)},
    }
    if args.what == "hybrid":
        config["async_training"] = {"method": "hybrid_async", "run_dir": str(args.out)}
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    engine, *_ = deepspeed_async.initialize(model=model, model_parameters=model.parameters(), config=config)
    divided = args.what in ("divided", "hybrid")
    sampler = DistributedSampler(data, engine.workers, engine.worker) if divided else None
    for x, y in DataLoader(data, 4, sampler=sampler):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        if args.what == "crash" and engine.worker == 0 and engine.global_steps == 4:
            raise RuntimeError("a mistake of the script's own")
    if divided:
        engine.end()
    summary = [engine.global_steps, [each.tolist() for each in model.parameters()]]
    (args.out / f"worker-{engine.worker}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
