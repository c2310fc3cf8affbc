"""Where a DeepSpeed engine keeps the gradients that its optimizer is about to step with, and the fp32 masters.

All attributes of DeepSpeed's optimizers that are not documented are read or set here, as DeepSpeed 0.19 has them.
DeepSpeed's documented functions (``safe_get_full_grad``, ``safe_get_full_fp32_param``) do not serve: with ZeRO 1 and 2
each call all-reduces one whole parameter, and what is needed is this rank's own part without a collective call.
"""

from typing import Any, TypeAlias

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.collective.adascale import Masters
from fairseq_async.deepspeed_plugin.zero3 import PartitionedReplica
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.replica import MasterReplica, Replica, TensorReplica

# A torch optimizer, or one of DeepSpeed's wrappers of it. The wrappers have neither type hints nor a base class that
# declares the attributes which are read here.
DeepSpeedOptimizer: TypeAlias = Any


def trainable(engine: DeepSpeedEngine) -> list[tuple[str, Parameter]]:
    """The parameters that are trained, and exchanged, in the order of the layout."""
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def step_gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    """The gradients of the coming step on this rank, after DeepSpeed's reduction; with ZeRO, this rank's partition.

    A parameter without a gradient gets zeros, so that all ranks have the same tensors.
    """
    optimizer = engine.optimizer
    if _is_zero(optimizer) or isinstance(optimizer, BF16_Optimizer):
        return [part for group in step_gradients_by_group(engine) for part in group]
    parameters = [parameter for _, parameter in trainable(engine)]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def step_gradients_by_group(engine: DeepSpeedEngine) -> list[list[Tensor]]:
    """The same gradients for each parameter group of an optimizer that keeps fp32 masters."""
    optimizer = engine.optimizer
    if _is_zero(optimizer):
        return [list(parts or []) for _, parts in sorted(optimizer.averaged_gradients.items())]
    if isinstance(optimizer, BF16_Optimizer):
        # the fp32 accumulators that it steps with, in place of the parameters' bf16 .grad
        return [list(parts) for parts in optimizer.fp32_groups_gradients]
    return [[each.grad for each in group if each.grad is not None] for group in _low_precision_groups(optimizer)]


def masters_of(optimizer: DeepSpeedOptimizer) -> Masters | None:
    """For each parameter of the model one master of its parameter group; None where the optimizer steps parameters.

    The master says which group, and so which learning rate, a parameter has; it is not that parameter's own master.
    """
    groups = _low_precision_groups(optimizer)
    if not groups:
        return None
    stepped = [group["params"][0] for group in optimizer.param_groups]
    return {parameter: (first, 0) for group, first in zip(groups, stepped, strict=True) for parameter in group}


def skips_nonfinite_steps(optimizer: DeepSpeedOptimizer) -> bool:
    """Whether the optimizer itself skips a step whose gradient has NaN or Inf."""
    return bool(_low_precision_groups(optimizer))


def has_nonfinite_step(engine: DeepSpeedEngine) -> bool:
    """Whether the coming step's gradient has NaN or Inf, and DeepSpeed would step with it: in fp32 without ZeRO."""
    if skips_nonfinite_steps(engine.optimizer) or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        return False
    given = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in given]
    return bool(dense) and not all_finite(dense)


def all_finite(gradients: list[Tensor]) -> bool:
    """Whether there is no NaN and no Inf in them."""
    norms = torch._foreach_norm(gradients, torch.inf)
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def check_overflow_always(optimizer: DeepSpeedOptimizer) -> None:
    """Makes ZeRO look for NaN and Inf at each step, in every type; by itself it never does so in fp32."""
    if hasattr(optimizer, "check_grad_overflow"):  # DeepSpeed's configuration has a key for bf16 only
        optimizer.check_grad_overflow = True


def loss_scale(engine: DeepSpeedEngine) -> float:
    """The factor of the loss that is in the gradients before a step: ``cur_scale`` of a ZeRO optimizer in fp16, or 1.

    Without ZeRO, DeepSpeed 0.19 does not multiply the loss in fp16, although its optimizer has a scale.
    """
    return float(getattr(engine.optimizer, "cur_scale", 1.0)) if engine.fp16_enabled() else 1.0


def replica_of(engine: DeepSpeedEngine, rank: int) -> Replica:
    """The engine's trainable parameters: themselves in fp32 without ZeRO, else their fp32 masters on this rank.

    Every rank of an island hands over its own partition; where all ranks hold everything, rank 0 does.

    Raises:
        ConfigurationError: the optimizer keeps its masters in a way that is not known.
    """
    named = trainable(engine)
    if engine.zero_optimization_partition_weights():
        return PartitionedReplica(named, rank)
    if all(hasattr(parameter, "_hp_mapping") for _, parameter in named):
        return MasterReplica(named, [_master_in_partition(parameter) for _, parameter in named])
    masters = _fp16_masters(engine.optimizer)
    if masters:
        return MasterReplica(named, [(0, masters[id(parameter)]) for _, parameter in named], rank == 0)
    if all(parameter.dtype is torch.float32 for _, parameter in named):
        return TensorReplica(named, rank == 0)
    raise ConfigurationError(f"no fp32 masters are known in {type(engine.optimizer).__name__}: use ZeRO stage 1")


def _is_zero(optimizer: DeepSpeedOptimizer) -> bool:
    """Whether it is the optimizer of ZeRO 1 and 2, which drops ``.grad`` and keeps this rank's reduced parts."""
    return hasattr(optimizer, "averaged_gradients")


def _low_precision_groups(optimizer: DeepSpeedOptimizer) -> list[list[Tensor]]:
    """The model's parameters by parameter group, where the optimizer's own groups hold fp32 masters instead of them.

    The name differs: ``bit16_groups`` in ZeRO, ``bf16_groups`` in BF16_Optimizer, ``fp16_groups`` in fp16 without ZeRO.
    """
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return []


def _master_in_partition(parameter: Tensor) -> tuple[int, Tensor] | None:
    """ZeRO 1, 2 and bf16: this rank's part of a parameter, as its first element and its master; None if it has none."""
    # the one link from a parameter to its slice of the flat master; safe_get_full_fp32_param goes the same way
    mapping = getattr(parameter, "_hp_mapping")  # noqa: B009 - torch's type hints do not know DeepSpeed's attribute
    return None if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)


def _fp16_masters(optimizer: DeepSpeedOptimizer) -> dict[int, Tensor]:
    """fp16 without ZeRO: the flat fp32 master of each parameter, by the parameter's ``id``."""
    masters: dict[int, Tensor] = {}
    for index, group in enumerate(getattr(optimizer, "fp16_groups", [])):
        if hasattr(optimizer, "fp32_groups_flat"):  # the fused optimizer has one flat master for a group
            flats = optimizer.fp32_groups_flat[index].split([parameter.numel() for parameter in group])
        else:  # the unfused optimizer has one for each parameter
            flats = [master.view(-1) for master in optimizer.fp32_groups[index]]
        masters |= {id(parameter): flat for parameter, flat in zip(group, flats, strict=True)}
    return masters
