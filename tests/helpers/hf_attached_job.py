"""A user's script that calls ``attach`` and begins a training in another way than by the Trainer: CASE RUN_DIR."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed import initialize

import fairseq_async.deepspeed_plugin as deepspeed_async

deepspeed_async.attach()

from accelerate import Accelerator  # noqa: E402


def main(case: str, out: Path) -> None:
    """Makes an engine, and prints what it is."""
    model = torch.nn.Linear(4, 1)
    if case == "flags alone":  # as accelerate launch --use_deepspeed --zero_stage 2 sets them
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
        Accelerator()
    if case == "without DeepSpeed":
        Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    if case != "without our section":
        config |= {"async_training": {"method": "hybrid_async", "run_dir": str(out / "run")}}
    if case == "imported before":
        initialize(model=model, config=config)
    elif case == "in a file":
        (out / "config.json").write_text(json.dumps(config))
        made = deepspeed.initialize(model=model, config=out / "config.json")
    else:
        made = deepspeed.initialize(None, model, None, None, None, None, 29500, None, None, None, config)
    print([each.__name__ for each in type(made[0]).__mro__])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
