"""What this plugin needs of DeepSpeed beyond its documented interface, and the check that a DeepSpeed has it.

``deepspeed_plugin/tensors.py`` reads the attributes of the optimizers, the engines of this plugin those of the engine.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.errors import ConfigurationError

MADE_FOR = "0.19.8"  # the version that setup.py names

# Of the engine: the methods that subclasses override, and the counts that they keep where they do.
ENGINE = (
    "_take_model_step",
    "_step_applied",
    "basic_optimizer",
    "global_samples",
    "global_steps",
    "lr_scheduler",
    "module",
    "monitor",
    "optimizer",
    "skipped_steps",
)
# Of each of DeepSpeed's optimizers, by its class: where the gradients of a step and the fp32 masters are.
OPTIMIZERS = {
    "DeepSpeedZeroOptimizer": ("averaged_gradients", "bit16_groups", "check_grad_overflow"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_gradients"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}


def check_attributes(engine: DeepSpeedEngine) -> None:
    """Checks that engine and optimizer have all that this plugin reads or overrides.

    Raises:
        ConfigurationError: DeepSpeed is of another version, which lacks one of them; names both.
    """
    _check(engine, "DeepSpeedEngine", ENGINE)
    optimizer = engine.optimizer
    for base in type(optimizer).__mro__:
        _check(optimizer, base.__name__, OPTIMIZERS.get(base.__name__, ()))


def _check(owner: object, class_name: str, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ConfigurationError(
            f"DeepSpeed {deepspeed.__version__} has no {class_name}.{missing[0]}, which this plugin needs: install "
            f"deepspeed=={MADE_FOR}"
        )


def unlink_reduction_buffer() -> None:
    """Removes the name of DeepSpeed's reduction buffer of this rank from /dev/shm; the memory stays in use.

    DeepSpeed opens the buffer in ``init_distributed`` on CPUs and never removes it: 66 MiB for each rank of each run.
    Collective: every rank of the world calls it after ``init_distributed``. The barrier is needed, since a rank opens
    the others' buffers by name.
    """
    dist.barrier()
    get = os.environ.get
    world = f"{os.getuid()}_{get('MASTER_ADDR')}_{get('MASTER_PORT')}"
    (Path("/dev/shm") / f"deepspeed_allreduce_buffer_{world}_{dist.get_rank()}").unlink(missing_ok=True)
