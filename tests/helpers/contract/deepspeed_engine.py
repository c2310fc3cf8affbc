"""A loop with an engine of DeepSpeed's."""

from pathlib import Path
from typing import Any

import deepspeed
from torch import nn

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.deepspeed_plugin.engines.synchronous import set_environment_without_launcher
from tests.helpers.contract.net import BATCH, DECAY, LOCAL, RATE, STEPS, Net, batches

assert deepspeed.ops.__compatible_ops__  # a search that would take each fork half a second


def train(net: Net, method: str, path: Path) -> nn.Module:
    adamw = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True}}
    config: dict[str, Any] = {"train_batch_size": BATCH, "optimizer": adamw}
    own = LOCAL if method == "local_sgd" else {"updates_per_step": 1}
    if method == "plain":
        set_environment_without_launcher()
    else:
        config["async_training"] = {"method": method, "run_dir": str(path), "total_steps": STEPS, **own}
    made: Any = deepspeed if method == "plain" else deepspeed_async
    engine, *_ = made.initialize(model=net, model_parameters=net.parameters(), config=config)
    for batch in batches():
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return net
