"""fairseq's half precision: --bf16 without TPUs, and where fairseq keeps fp32 masters and the loss scale."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from fairseq.optim import FairseqOptimizer, FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import AsyncError
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig

logger = logging.getLogger(__name__)


def convert_without_tpu(convert: Callable[[Namespace], FairseqConfig], args: Namespace) -> FairseqConfig:
    """Converts the command line with fairseq's ``convert``, but does not let --bf16 stand for --tpu.

    fairseq takes every bf16 run for one on TPUs, before it starts any process; CPUs and GPUs have bf16, too.
    """
    if args.bf16:
        args.tpu = False
    return convert(args)


def innermost(optimizer: FairseqOptimizer) -> FairseqOptimizer:
    """Returns the optimizer that ``--optimizer`` names; fairseq wraps it in another for a half-precision model."""
    return optimizer.fp32_optimizer if isinstance(optimizer, FP16Optimizer) else optimizer


def has_flat_master(optimizer: FairseqOptimizer) -> bool:
    """Whether fairseq steps one flat fp32 master in place of the model's parameters."""
    return isinstance(optimizer, FP16Optimizer) and bool(optimizer.has_flat_params)


def scales(optimizer: FairseqOptimizer) -> tuple[float, float]:
    """Returns the factor by which gradients are still to be multiplied, and the loss scale; both 1 in fp32.

    fairseq's FP16Optimizer remembers the factor of ``multiply_grads`` until it clips.
    """
    if not isinstance(optimizer, FP16Optimizer):
        return 1.0, 1.0
    return float(optimizer._multiply_factor), 1.0 if optimizer.scaler is None else float(optimizer.scaler.loss_scale)


def forget_factor(optimizer: FairseqOptimizer) -> None:
    """Sets the factor of :func:`scales` to 1 for the next step, whose gradients were cleared.

    Clipping a norm of NaN makes the factor NaN. Without a loss scale fairseq does not set it again, and 0 · NaN is NaN.
    """
    if isinstance(optimizer, FP16Optimizer) and optimizer.scaler is None:
        optimizer._multiply_factor = 1.0


def fp32_masters(optimizer: FairseqOptimizer) -> list[tuple[Parameter, Tensor, int]] | None:
    """Finds fairseq's fp32 masters of a half-precision model; None for an optimizer without masters.

    Returns:
        for each parameter its master, and the index at which the parameter's elements begin in it: fairseq makes one
        flat master of all parameters of a device, unless ``--fp16-no-flatten-grads`` is given.
    """
    if not isinstance(optimizer, FP16Optimizer):
        return None
    if not has_flat_master(optimizer):
        pairs = zip(optimizer.fp16_params, optimizer.fp32_params, strict=True)
        return [(parameter, master, 0) for parameter, master in pairs]
    (flat,) = optimizer.fp32_params.values()  # one for each device, of which there is one
    masters, offset = [], 0
    for parameter in optimizer.fp16_params:
        masters.append((parameter, flat, offset))
        offset += parameter.numel()
    return masters


def loss_scaler(cfg: FairseqConfig) -> DynamicLossScaler:
    """Makes the loss scaler of an fp16 model as fairseq does, which makes one only inside its own FP16Optimizer."""
    common, ranks = cfg.common, cfg.distributed_training.distributed_world_size
    return DynamicLossScaler(
        init_scale=common.fp16_init_scale,
        scale_window=common.fp16_scale_window or int(2**14 / ranks / cfg.optimization.update_freq[0]),
        tolerance=common.fp16_scale_tolerance,
        threshold=common.threshold_loss_scale,
        min_loss_scale=common.min_loss_scale,
    )


@contextmanager
def loss_scale_errors() -> Iterator[None]:
    """Turns the FloatingPointError that fairseq raises for a loss scale at its minimum into an error of one line.

    fairseq's trainer takes a FloatingPointError for NaN in the model: it would compute the step again to look for it.
    """
    try:
        yield
    except FloatingPointError as error:
        raise AsyncError(str(error)) from error


def overflows(scaler: DynamicLossScaler, norm: Tensor) -> bool:
    """Whether the loss scale was too large for this batch; the scaler lowers it then."""
    try:
        with loss_scale_errors():
            scaler.check_overflow(norm)
    except OverflowError as overflow:
        logger.info("gradient overflow, batch skipped, %s", overflow)
        return True
    return False


def skip_next_step(optimizer: FairseqOptimizer) -> None:
    """Lets the optimizer's next step do nothing.

    fairseq's trainer skips the step after an OverflowError, but makes a tensor on a GPU there, which not all runs have.
    """

    def step(*args: object, **kwargs: object) -> None:
        del optimizer.step  # the class's own is found again

    optimizer.step = step


def finite_norm(norm: Tensor) -> Tensor:
    """Returns the norm, or 0 if it is not finite: fairseq's trainer would end the run at a norm that is not finite."""
    return norm if bool(torch.isfinite(norm)) else torch.zeros_like(norm)
