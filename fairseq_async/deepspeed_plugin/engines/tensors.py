"""Where a DeepSpeed engine keeps the gradients that its optimizer is about to step with, and the fp32 masters.

DeepSpeed's documented functions (``safe_get_full_grad``, ``safe_get_full_fp32_param``) do not serve: with ZeRO 1 and 2
each call all-reduces one whole parameter, and what is needed is this rank's own part without a collective call.
"""

from collections.abc import Sequence

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.muon import MuonAdamW
from fairseq_async.collective.adascale import Masters
from fairseq_async.deepspeed_plugin.compat import (
    DeepSpeedOptimizer,
    fp16_masters,
    has_master_in_partition,
    keeps_gradients_apart,
    link_masters,
    low_precision_groups,
    master_in_partition,
    optimizer_gradients,
)
from fairseq_async.deepspeed_plugin.engines.zero3 import PartitionedReplica
from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import parameters
from fairseq_async.server.optimizers.torch_optimizer import check_of_model
from fairseq_async.worker.replica import MasterReplica, Replica, TensorReplica


def trainable(engine: DeepSpeedEngine) -> list[tuple[str, Parameter]]:
    """Returns the parameters that are trained, and exchanged, in the order of the layout."""
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def watched(engine: DeepSpeedEngine) -> Sequence[tuple[str, Tensor]]:
    """Returns the parameters that are trained; in ZeRO 3, this rank's partitions of their fp32 masters."""
    whole = not engine.zero_optimization_partition_weights()
    return trainable(engine) if whole else PartitionedReplica(_stepped(engine), 0).named


def unstepped(engine: DeepSpeedEngine) -> list[tuple[str, Parameter]]:
    """Returns the parameters that are trained and that the engine's optimizer does not have."""
    stepped = {id(parameter) for _, parameter in _stepped(engine)}
    return [(name, parameter) for name, parameter in trainable(engine) if id(parameter) not in stepped]


def check_matrices(engine: DeepSpeedEngine) -> None:
    """Checks that the package's Muon has whole matrices.

    Raises:
        ConfigurationError: an optimizer of DeepSpeed's wraps it, as with ZeRO, and may give it flat vectors.
    """
    wrapper = engine.optimizer
    if isinstance(engine.basic_optimizer, MuonAdamW) and wrapper is not engine.basic_optimizer:
        raise ConfigurationError(
            f"MuonAdamW steps whole matrices, and DeepSpeed's {type(wrapper).__name__} gives it flat vectors: leave "
            'out "zero_optimization", "bf16" and "fp16", or use "optimizer": {"type": "Muon"}'
        )


def check_unstepped(parameters: list[tuple[str, Parameter]]) -> None:
    """Checks, after ``backward``, the parameters of :func:`unstepped`, which are in no exchange.

    Raises:
        ConfigurationError: one has a gradient; something else than the engine trains it.
    """
    for name, parameter in parameters:
        if parameter.grad is not None:
            raise ConfigurationError(
                f"{name} has a gradient and is in no exchange: each worker would have its own values; give it to the "
                "engine's optimizer, or freeze it with requires_grad_(False) before initialize"
            )


def _stepped(engine: DeepSpeedEngine) -> list[tuple[str, Parameter]]:
    """Returns the parameters of :func:`trainable` that the optimizer has: it keeps no master of another parameter.

    Raises:
        ConfigurationError: the optimizer has none of them, or has parameters of another model.
    """
    named = trainable(engine)
    groups = low_precision_groups(engine.optimizer) or [group["params"] for group in engine.optimizer.param_groups]
    given = {id(parameter) for group in groups for parameter in group}
    if not low_precision_groups(engine.optimizer):
        check_of_model(engine.optimizer, named)
    found = [(name, parameter) for name, parameter in named if id(parameter) in given]
    if not found:
        raise ConfigurationError("the optimizer has no parameter of the model that is trained")
    return found


def step_gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    """Returns this rank's gradients of the coming step, after DeepSpeed's reduction; with ZeRO, its partition of them.

    A parameter without a gradient gets zeros, so that all ranks have the same tensors.

    Raises:
        ConfigurationError: a gradient is sparse.
    """
    optimizer = engine.optimizer
    if keeps_gradients_apart(optimizer):
        return [part for group in optimizer_gradients(optimizer) for part in group]
    named = trainable(engine)
    for _, parameter in named:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters.step_gradients(named)


def masters_of(optimizer: DeepSpeedOptimizer) -> Masters | None:
    """Returns for each parameter of the model one master of its parameter group; None if the optimizer has no masters.

    The master says which group, and so which learning rate, a parameter has; it is not that parameter's own master.
    """
    groups = low_precision_groups(optimizer)
    if not groups:
        return None
    stepped = [group["params"][0] for group in optimizer.param_groups]
    return {parameter: (first, 0) for group, first in zip(groups, stepped, strict=True) for parameter in group}


def skips_nonfinite_steps(optimizer: DeepSpeedOptimizer) -> bool:
    """Whether the optimizer itself skips a step whose gradient has NaN or Inf."""
    return bool(low_precision_groups(optimizer))


def has_no_gradient(engine: DeepSpeedEngine) -> bool:
    """Whether the script has computed no gradient for the coming step, in fp32 without ZeRO; DeepSpeed's own optimizers
    step with zeros then."""
    gradients = (parameter.grad for parameter in engine.module.parameters())
    return not skips_nonfinite_steps(engine.optimizer) and all(gradient is None for gradient in gradients)


def has_nonfinite_step(engine: DeepSpeedEngine) -> bool:
    """Whether the coming step's gradient has NaN or Inf, and the optimizer does not see that: in fp32 without ZeRO."""
    if skips_nonfinite_steps(engine.optimizer):
        return False
    given = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in given]
    return bool(dense) and not all_finite(dense)


def all_finite(gradients: list[Tensor]) -> bool:
    """Whether there is no NaN and no Inf in the gradients."""
    norms = torch._foreach_norm(gradients, torch.inf)
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def check_masters(replica: Replica) -> None:
    """Checks, before the first batch, that the model's parameters are what their fp32 masters are rounded to.

    Raises:
        ConfigurationError: the script has changed one since ``initialize``, and not its master.
    """
    if isinstance(replica, MasterReplica | PartitionedReplica) and (name := replica.strayed()):
        raise ConfigurationError(
            f"{name} was changed after initialize, and its fp32 master was not: DeepSpeed's first step would undo the "
            "change; load parameters before initialize, or by engine.load_checkpoint"
        )


def round_masters(replica: Replica) -> None:
    """Rounds the model's parameters from their fp32 masters, as DeepSpeed has made them.

    In half precision without ZeRO it takes a step of zeros when it makes an engine, in which a weight decay changes the
    masters alone.
    """
    if isinstance(replica, MasterReplica):
        replica.round_masters()


def replica_of(engine: DeepSpeedEngine, rank: int) -> Replica:
    """Returns the engine's trainable parameters: themselves in fp32 without ZeRO, else this rank's fp32 masters.

    Every rank of an island hands over its own partition; where all ranks hold everything, rank 0 does.

    Raises:
        ConfigurationError: the optimizer keeps its masters in a way that is not known.
    """
    named = _stepped(engine)
    if engine.zero_optimization_partition_weights():
        return PartitionedReplica(named, rank)
    link_masters(engine.optimizer)
    if all(has_master_in_partition(parameter) for _, parameter in named):
        return MasterReplica(named, [master_in_partition(parameter) for _, parameter in named])
    masters = fp16_masters(engine.optimizer)
    if masters:
        return MasterReplica(named, [(0, masters[id(parameter)]) for _, parameter in named], rank == 0)
    if all(parameter.dtype is torch.float32 for _, parameter in named):
        return TensorReplica(named, rank == 0)
    name, parameter = next((name, each) for name, each in named if each.dtype is not torch.float32)
    key = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(parameter.dtype)
    remedy = f'give "{key}": {{"enabled": true}}' if key else "make it float32"
    kind = str(parameter.dtype).removeprefix("torch.")
    raise ConfigurationError(f"{name} is {kind}, and {type(engine.optimizer).__name__} has no fp32 master: {remedy}")
