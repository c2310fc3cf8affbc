"""Where a DeepSpeed engine keeps the parameters that its optimizer steps."""

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.replica import MasterReplica, Replica, TensorReplica


def replica_of(engine: DeepSpeedEngine, rank: int) -> Replica:
    """The engine's trainable parameters: as they are in fp32 without ZeRO, else their fp32 masters on this rank.

    Every rank of an island hands over its own partition; where all hold everything, the first does.

    Raises:
        ConfigurationError: the optimizer keeps its masters in a way that is not known.
    """
    named = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    if all(hasattr(parameter, "_hp_mapping") for _, parameter in named):
        return MasterReplica(named, [_fragment(parameter) for _, parameter in named])
    masters = _fp16_masters(engine.optimizer)
    if masters:
        return MasterReplica(named, [(0, masters[id(parameter)]) for _, parameter in named], rank == 0)
    if all(parameter.dtype is torch.float32 for _, parameter in named):
        return TensorReplica(named, rank == 0)
    raise ConfigurationError(f"no fp32 masters are known in {type(engine.optimizer).__name__}: use ZeRO stage 1")


def _fragment(parameter: Any) -> tuple[int, Tensor] | None:
    """ZeRO 1 and 2, and bf16: what of this parameter lies in this rank's partition."""
    mapping = parameter._hp_mapping
    return None if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)


def _fp16_masters(optimizer: Any) -> dict[int, Tensor]:
    """fp16 without ZeRO: one flat master a group (fused), or one a parameter."""
    masters: dict[int, Tensor] = {}
    groups = getattr(optimizer, "fp16_groups", [])
    for index, group in enumerate(groups):
        if hasattr(optimizer, "fp32_groups_flat"):
            flats = optimizer.fp32_groups_flat[index].split([parameter.numel() for parameter in group])
        else:
            flats = [master.view(-1) for master in optimizer.fp32_groups[index]]
        masters |= {id(parameter): flat for parameter, flat in zip(group, flats, strict=True)}
    return masters
