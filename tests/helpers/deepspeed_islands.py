"""A DeepSpeed script by plain DeepSpeed and as workers of several ranks: ``deepspeed_islands.py OUT CASE [SIZES]``.

Four ranks of plain DeepSpeed train, and then two workers of two ranks; each rank is a process that is forked after
DeepSpeed is imported. With SIZES, as "2,1", the ranks of plain DeepSpeed are as many; the workers are started by
``fairseq-async launch``, which calls this program for each rank. A rank leaves the parameters that it came to, and the
loss of each step, in OUT; what it has printed is in a log there.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, distributed, nn

import fairseq_async.deepspeed_plugin as deepspeed_async
from fairseq_async.environment import RANKS
from fairseq_async.options.addresses import free_port

STEPS, BATCH = 50, 4
ADAM = {"type": "AdamW", "params": {"lr": 0.005, "weight_decay": 0.1, "torch_adam": True}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.005, "warmup_num_steps": 5}}
SGD = {"type": "SGD", "params": {"lr": 0.05}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}  # of the workers alone: a server has their optimizer
HYBRID = {"method": "hybrid_async", "barrier": True, "total_steps": STEPS}
# rounds of one local step, of which the server takes the mean
LOCAL = {"method": "local_sgd", "outer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0, "local_steps": 1}
LOCAL |= {"total_steps": STEPS}


def zero(stage: int, **precision: Any) -> dict[str, Any]:
    config = {"optimizer": ADAM, "scheduler": WARM_UP, "gradient_clipping": 0.5, "async_training": HYBRID}
    return config | {"zero_optimization": {"stage": stage}} | precision


CASES = {f"fp32-{stage}": zero(stage) for stage in range(4)}
CASES |= {"bf16-3": zero(3, **BF16), "fp16-1": zero(1, **FP16)}
CASES |= {"hybrid": zero(0), "local": {"optimizer": SGD, "gradient_clipping": 0.0, "async_training": LOCAL}}
# of ZeRO, whose partitions are not in the model's order then
DEALT = {"stage": 2, "round_robin_gradients": True}
CASES["dealt"] = CASES["local"] | {"zero_optimization": DEALT, "zero_allow_untested_optimizer": True}
ENDLESS = {"method": "hybrid_async", "total_steps": 1000000, "snapshot_seconds": 1}
CASES["endless"] = zero(3) | {"async_training": ENDLESS}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return inputs, inputs.sin().sum(1, keepdim=True)


def train(config: dict[str, Any], path: Path) -> None:
    """Trains by plain DeepSpeed where the configuration has no "async_training"; leaves ``PATH-RANK.pt``."""
    if "fp16" in config:  # which the CPU computes, if slowly
        get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16]
        get_accelerator().is_fp16_supported = lambda: True
    config = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 2000000000} | config
    is_plain, model = "async_training" not in config, make_model()
    initialize: Callable[..., Any] = deepspeed.initialize if is_plain else deepspeed_async.initialize
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = distributed.get_rank() if is_plain else engine.context.global_rank
    kind, losses = next(engine.module.parameters()).dtype, []
    for step in range(config.get("async_training", {}).get("total_steps", STEPS)):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(engine(inputs.to(kind)).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with GatheredParameters(list(engine.module.parameters()), enabled=engine.zero_optimization_partition_weights()):
        ended = nn.utils.parameters_to_vector(engine.module.parameters()).detach().float()
    torch.save({"parameters": ended, "losses": losses}, f"{path}-{rank}.pt")


def fork(ranks: int, config: dict[str, Any], path: Path) -> None:
    """Trains in a process for each rank, which ends as a script would; returns when all have ended."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            torch.set_num_threads(1)
            with Path(f"{path}.log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            train(config, path)
            sys.exit()
    for _ in range(ranks):
        os.wait()


def main(out: Path, name: str, sizes: str = "2,2") -> None:
    plain = dict(CASES[name])
    section = plain.pop("async_training") | {"run_dir": str(out / "run")}
    if RANKS in os.environ:
        return train(plain | {"async_training": section}, out / "ours")
    fork(sum(map(int, sizes.split(","))), plain, out / "plain")
    if sizes != "2,2":
        return None
    zero = plain["zero_optimization"] | (OFFLOADED if plain["zero_optimization"]["stage"] > 1 else {})
    changes = {"zero_optimization": zero, "async_training": section | {"island_size": 2}}
    return fork(4, plain | changes, out / "ours")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
