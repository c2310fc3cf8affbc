"""What an engine of ``hybrid_async`` leaves to the server: its optimizer, learning rates and clipping, as JSON."""

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.algorithms.muon import MuonAdamW
from fairseq_async.deepspeed_plugin import schedules
from fairseq_async.deepspeed_plugin.compat import accumulate_in_fp32, optimizer_of_whole, restore_fp16, round_model
from fairseq_async.deepspeed_plugin.config import BF16, FLOAT32
from fairseq_async.deepspeed_plugin.engines.tensors import trainable
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject
from fairseq_async.server.optimizers.learning_rates import tabulate
from fairseq_async.server.optimizers.torch_optimizer import describe

SCHEDULER = "scheduler"  # the key of a schedule of DeepSpeed's, beside those of OptimizerSpec


def without_schedule(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration without a schedule of DeepSpeed's: the server needs the rates before its warm-up."""
    if not schedules.is_deepspeeds(config.get("scheduler")):
        return config
    return {key: value for key, value in config.items() if key != "scheduler"}


def without_masters(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration without half precision, of which DeepSpeed makes fp32 masters, without ZeRO 1 and 2,
    which divide these and the moments among ranks, and without the type of these stages' sums: they are the server's,
    or this package's. ZeRO 3, which divides the model too, stays as it is."""
    if is_divided(config):
        return config | {"zero_allow_untested_optimizer": True}  # it does not step here
    config = {key: value for key, value in config.items() if key not in (*BF16, "fp16", "data_types")}
    return config | {"zero_optimization": {"stage": 0}} if "zero_optimization" in config else config


def is_divided(config: dict[str, Any]) -> bool:
    """Whether each rank of a worker has a part of the model, by ZeRO 3."""
    return bool((config.get("zero_optimization") or {}).get("stage", 0) == 3)


def half_precision(config: dict[str, Any]) -> torch.dtype | None:
    """Returns the type of a model that is to be in half precision; None for fp32."""
    kinds = dict.fromkeys(BF16, torch.bfloat16) | {"fp16": torch.float16}
    return next((kind for key, kind in kinds.items() if (config.get(key) or {}).get("enabled", False)), None)


def served_optimizer(engine: DeepSpeedEngine, config: dict[str, Any], groups: list[Any]) -> torch.optim.Optimizer:
    """Returns the optimizer that the server is to have, and rounds the engine's model in half precision.

    Args:
        engine: made by DeepSpeed from :func:`without_masters`.
        groups: the parameters that the script has given, or groups of them; empty for all that are trained.
    """
    if is_divided(config):  # which rounds the model itself
        return optimizer_of_whole(engine, config["optimizer"], groups or [each for _, each in trainable(engine)])
    if (kind := half_precision(config)) is not None:
        round_model(engine, kind)
        restore_fp16(engine, config.get("fp16") or {})
        if (config.get("data_types") or {}).get("grad_accum_dtype") in FLOAT32:
            accumulate_in_fp32(engine)
    own: torch.optim.Optimizer = engine.optimizer
    return own


def leave_to_server(
    engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, config: dict[str, Any], total_steps: int
) -> JsonObject:
    """Returns what the server builds from; gives the engine the schedule that :func:`without_schedule` has left out,
    and the whole configuration, which scripts read as ``engine.config``.

    Args:
        engine: the engine that DeepSpeed has made of the configuration without a schedule.
        optimizer: that of the whole parameters.
        config: the whole configuration.
        total_steps: steps of the server in the whole run; 0 for no end.

    Raises:
        ConfigurationError: no parameter is trained, or the server has no optimizer that would step equally.
    """
    section, engine.config = config.get("scheduler"), config
    if not trainable(engine):
        raise ConfigurationError("the model has no parameter that is trained")
    inner = described(engine, optimizer, total_steps)
    if engine.lr_scheduler is None and section is not None and schedules.is_deepspeeds(section):
        engine.lr_scheduler = schedules.build(section, optimizer)
        inner[SCHEDULER] = section
    return inner


def described(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, total_steps: int) -> JsonObject:
    """Returns what the server builds from, with the options and the rates of the optimizer and the engine's schedule
    from where they are now.

    Raises:
        ConfigurationError: the server has no optimizer that would step equally, or the schedule cannot be a table.
    """
    schedule = engine.lr_scheduler
    rates = None if schedule is None else tabulate(schedule, optimizer, total_steps)
    clip_norm = float(engine.gradient_clipping())
    return describe(optimizer, trainable(engine), equal_of_torch(optimizer), rates, clip_norm).to_json()


def count_steps_as_torch(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter its step count, as torch's optimizers keep it: of a group, FusedAdam counts in the state of
    one parameter alone, for all that have gradients."""
    if type(getattr(optimizer, "aux_optimizer", optimizer)) is FusedAdam:
        for group in optimizer.param_groups:
            states = [optimizer.state[each] for each in group["params"] if optimizer.state.get(each)]
            steps = max((state["step"] for state in states), default=0)
            for state in states:
                state["step"] = steps


def equal_of_torch(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class that takes the same steps as DeepSpeed's Adam or Muon; "" for another optimizer.

    DeepSpeed iterates for Muon in fp16, or in fp32 where a device has none, and torch in bf16: the steps are equal
    within the rounding of bf16.

    Raises:
        ConfigurationError: no class of the server takes the same steps.
    """
    if _is_deepspeeds_muon(optimizer):
        return _equal_of_muon(optimizer)
    if type(optimizer) not in (FusedAdam, DeepSpeedCPUAdam):
        return ""
    if not all(group["bias_correction"] for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise ConfigurationError(f"{name} with bias_correction False has no equal in the server; leave that out")
    return "AdamW" if vars(optimizer)["adam_w_mode"] else "Adam"


def _is_deepspeeds_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is the one of ``"type": "Muon"``; its module compiles for a while when it is imported."""
    return type(optimizer).__module__ == "deepspeed.runtime.zero.muon.muon_optimizer"


def _equal_of_muon(optimizer: torch.optim.Optimizer) -> str:
    groups = optimizer.param_groups
    matrices = [each for group in groups if group["use_muon"] for each in group["params"]]
    problem = ""
    if any(getattr(each, "muon_num_heads", None) for each in matrices):
        problem = '"per_head_muon"'
    elif not vars(optimizer)["adam_w_mode"] or not all(group.get("bias_correction", True) for group in groups):
        problem = '"adam_w_mode" or "bias_correction" false'
    elif shapes := [tuple(each.shape) for each in matrices if each.ndim != 2]:
        problem = f"a tensor of shape {shapes[0]}"
    if problem:
        raise ConfigurationError(
            f'"optimizer": "type" is "Muon" with {problem}, which has no equal in the server: leave it out, or use '
            "local_sgd"
        )
    return MuonAdamW.__name__
