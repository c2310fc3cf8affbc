"""``--optimizer adascale``: steps as long as the batches of a step are worth."""

import logging
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.optim import FP16Optimizer, register_optimizer
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.collective.adam_norm import Masters
from fairseq_async.collective.adascale import AdaScale
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import group_options
from fairseq_async.fairseq_plugin.group_session import attach
from fairseq_async.fairseq_plugin.group_trainer import GroupTrainer
from fairseq_async.fairseq_plugin.trainer import AppliedUpdates
from fairseq_async.fairseq_plugin.wrapped import WrappedOptimizer
from fairseq_async.worker.config import AdaScaleOptions

logger = logging.getLogger(__name__)

_HELP = {
    "scale": "single batches in a step (ranks times --update-freq)",
    "estimator": "batches, or differences of consecutive gradients, for one rank without --update-freq (batches)",
    "smoothing": "of the averages, in [0, 1) (the paper's: max(1 - scale/1000, 0))",
    "interval": "take norms in every N-th step (1)",
}
_INNER = {"sgd", "nag", "adam"}


@register_optimizer("adascale")
class AdaScaleOptimizer(WrappedOptimizer):
    """The inner optimizer with its learning rate times the gain.

    Attributes:
        adascale: measures the gain; the trainer makes it, since it knows the model's parameters and the ranks.
    """

    adascale: AdaScale

    def __init__(self, args: Namespace, params: Iterable[Parameter]) -> None:
        super().__init__(args, params)
        self.options = group_options.options_of(args, AdaScaleOptions, _HELP)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        group_options.add_arguments(parser, "adascale", _HELP, _INNER, legacy=False)
        attach(sys.modules)

    def step(self, closure: Any = None, scale: float = 1.0, groups: Any = None) -> None:
        if not self.skip:
            with self.adascale.stretched():
                super().step(closure, scale, groups)
            self.adascale.advance()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "adascale": self.adascale.statistics()}

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        super().load_state_dict(state_dict, optimizer_overrides)
        self.adascale.load_statistics(state_dict["adascale"])


class AdaScaleTrainer(GroupTrainer):
    """``num_updates`` is the number of scale-invariant steps, rounded down: the learning-rate schedule,
    ``--max-update`` and all intervals are those of the run with one batch in a step."""

    @classmethod
    def check(cls, cfg: Any) -> None:
        """
        Raises:
            ConfigurationError: flags that do not go together, or a step with one gradient.
        """
        group_options.check(cfg.optimizer, cfg, legacy=False)
        options, gradients = _options_of(cfg), _gradients(cfg)
        if options.scale is not None and len(set(gradients)) > 1:
            raise ConfigurationError("--adascale-scale with several --update-freq: leave it out")
        options.scale_of(max(gradients))

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        self._options, self._gradients, self._warned = _options_of(cfg), _gradients(cfg), False
        super().__init__(cfg, *args, **kwargs)

    def _build_optimizer(self) -> None:
        before = None if self._optimizer is None else self.method
        super()._build_optimizer()
        if before is not None:  # fairseq builds it anew for a checkpoint
            before.adascale.close()
        method, inner = self.method, self.arguments.inner_optimizer
        method.adascale = AdaScale(
            method.optimizer,
            self._options.scale_of(max(self._gradients)),
            process_group=self.data_parallel_process_group,
            accumulation=max(self.cfg.optimization.update_freq),
            estimator=self._options.estimator,
            adaptive=inner == "adam",
            smoothing=self._options.smoothing,
            interval=self._options.interval,
            masters=_masters(self.optimizer),
        )

    def begin_epoch(self, epoch: int) -> None:
        gradients = self._gradients[min(epoch, len(self._gradients)) - 1]
        scale = 1.0 if gradients == 1 and len(self._gradients) > 1 else self._options.scale_of(gradients)
        self.method.adascale.set_scale(scale, gradients // self.data_parallel_world_size)
        super().begin_epoch(epoch)

    # One step

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        self.method.adascale.forget()
        return super().train_step(samples, raise_oom)

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        super()._see(module, inputs, output)
        if torch.is_grad_enabled():
            self.method.adascale.begin_pass(0.0 if self._dummy else float(output[1]))

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Gradients are reduced here, and not clipped yet."""
        adascale, optimizer = self.method.adascale, self.optimizer
        half = isinstance(optimizer, FP16Optimizer)
        factor = float(optimizer._multiply_factor) if half else 1.0
        loss_scale = float(optimizer.scaler.loss_scale) if half and optimizer.scaler is not None else 1.0
        unseen = adascale.due and adascale.estimator == "batches" and adascale.passes < len(self._weights)
        if unseen and not self._warned:
            self._warned = True
            logger.warning(
                "adascale saw %d backward passes for %d batches: a loss that is summed over batches before backward "
                "hides their noise, and the gain is too low; call backward for each batch",
                adascale.passes,
                len(self._weights),
            )
        adascale.measure_sums(math.fsum(self._weights), factor, loss_scale)
        return super().clip_grad_norm(clip_norm)

    def set_num_updates(self, num_updates: int) -> None:
        if not self._in_step or self.method.skip:
            return super().set_num_updates(num_updates)
        previous, steps = int(self.get_num_updates()), int(self.method.adascale.scale_invariant_steps)
        Trainer.set_num_updates(self, steps)
        self._num_updates = AppliedUpdates(steps, previous)

    def _reduce_and_log_stats(self, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            whole = self.method.adascale.gains.whole
            values = {
                "gain": whole.gain,
                "noise_scale": whole.noise_scale,
                "variance": whole.variance,
                "square_mean": whole.square_mean,
                "scale": whole.scale,
                "iterations": self.method.adascale.steps,
            }
            for name, value in values.items():
                if math.isfinite(value):
                    metrics.log_scalar(name, value, weight=0, priority=600)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    def state_dict(self) -> dict[str, Any]:
        Trainer.set_num_updates(self, int(self.get_num_updates()))  # of a type that torch loads without trust
        return super().state_dict()


def _options_of(cfg: Any) -> AdaScaleOptions:
    return group_options.options_of(cfg.optimizer, AdaScaleOptions, _HELP)


def _gradients(cfg: Any) -> list[int]:
    """Of a step, for each epoch as ``--update-freq`` lists them."""
    return [cfg.distributed_training.distributed_world_size * each for each in cfg.optimization.update_freq]


def _masters(optimizer: Any) -> Masters | None:
    """Where fairseq keeps the fp32 masters of a half-precision model."""
    if not isinstance(optimizer, FP16Optimizer):
        return None
    if not optimizer.has_flat_params:
        return {low: (master, 0) for low, master in zip(optimizer.fp16_params, optimizer.fp32_params, strict=True)}
    (flat,) = optimizer.fp32_params.values()
    masters, offset = {}, 0
    for parameter in optimizer.fp16_params:
        masters[parameter] = (flat, offset)
        offset += parameter.numel()
    return masters
