"""``--optimizer adascale``: multiplies the learning rate by a gain that is measured from the batches of each step."""

import logging
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

import torch
from fairseq.logging import metrics
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.collective.adascale import AdaScale, Masters
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags, refused
from fairseq_async.fairseq_plugin.compat.batches import real_batches
from fairseq_async.fairseq_plugin.compat.checkpoints import of_another_optimizer
from fairseq_async.fairseq_plugin.compat.precision import fp32_masters, scales
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates
from fairseq_async.fairseq_plugin.session import attach
from fairseq_async.fairseq_plugin.synchronous.trainer import SynchronousTrainer, WrappedOptimizer
from fairseq_async.options.config import AdaScaleOptions

logger = logging.getLogger(__name__)


class AdaScaleOptimizer(WrappedOptimizer):
    """An optimizer that steps the inner optimizer with its learning rates multiplied by AdaScale's gain.

    Attributes:
        adascale: measures the gain; set by the trainer, which knows the model's parameters and the ranks.
    """

    adascale: AdaScale

    def __init__(self, args: Namespace, params: Iterable[Parameter]) -> None:
        super().__init__(args, params)
        self.options = flags.adascale_options(args)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the method's flags; fairseq calls this for the optimizer that is chosen."""
        flags.add_synchronous_method(parser, "adascale", legacy=False)
        attach(sys.modules)

    def step(self, closure: object = None, scale: float = 1.0, groups: object = None) -> None:
        """Steps the inner optimizer with the scaled learning rates, unless the step is skipped."""
        if not self.skip:
            with self.adascale.scaled_learning_rate():
                super().step(closure, scale, groups)
            self.adascale.advance()

    def state_dict(self) -> StateDict:
        """Returns the inner optimizer's state, and the statistics of the gain."""
        return {**self.inner.state_dict(), "adascale": self.adascale.statistics()}

    def load_state_dict(self, state_dict: StateDict, optimizer_overrides: StateDict | None = None) -> None:
        """Restores the inner optimizer's state, and the statistics of the gain."""
        if "adascale" not in state_dict:
            raise of_another_optimizer("adascale")
        super().load_state_dict(state_dict, optimizer_overrides)
        self.adascale.load_statistics(state_dict["adascale"])


class AdaScaleTrainer(SynchronousTrainer):
    """The trainer of ``--optimizer adascale``.

    ``num_updates`` is the number of scale-invariant steps, rounded down. So the learning-rate schedule,
    ``--max-update`` and all intervals count as in a run with one batch per step.
    """

    @classmethod
    def check(cls, cfg: FairseqConfig) -> None:
        """Checks the flags.

        Raises:
            ConfigurationError: flags that do not go together, or a step with one gradient.
        """
        refused.check_synchronous(cfg.optimizer, cfg, legacy=False)
        options, gradients = _options_of(cfg), _gradients(cfg)
        if options.scale is not None and len(set(gradients)) > 1:
            raise ConfigurationError("--adascale-scale with several --update-freq: leave it out")
        options.scale_of(max(gradients))

    _num_updates: int

    def __init__(self, cfg: FairseqConfig, *args: FairseqObject, **kwargs: FairseqObject) -> None:
        self._options, self._gradients, self._warned = _options_of(cfg), _gradients(cfg), False
        self._passes: set[int] = set()  # the backward passes of a step from a loss of the criterion
        super().__init__(cfg, *args, **kwargs)

    def _build_optimizer(self) -> None:
        before = None if self._optimizer is None else self.wrapped
        super()._build_optimizer()
        if before is not None:  # fairseq builds its optimizer anew for a checkpoint
            before.adascale.close()
        wrapped, inner = self.wrapped, self.arguments.inner_optimizer
        wrapped.adascale = AdaScale(
            wrapped.optimizer,
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
        """Sets AdaScale's scale for the epoch's ``--update-freq``."""
        gradients = self._gradients[min(epoch, len(self._gradients)) - 1]
        scale = 1.0 if gradients == 1 and len(self._gradients) > 1 else self._options.scale_of(gradients)
        self.wrapped.adascale.set_scale(scale, gradients // self.data_parallel_world_size)
        super().begin_epoch(epoch)

    # One step

    def train_step(self, samples: Sequence[FairseqObject], raise_oom: bool = False) -> FairseqObject:
        """Takes one step as fairseq does, after dropping the norms that a step that was not taken has left."""
        self.wrapped.adascale.discard_norms()
        self._batches, self._passes = len(real_batches(samples)), set()
        self._num_updates = int(self._num_updates)  # tasks and models may take remainders of it
        return super().train_step(samples, raise_oom)

    def _after_forward(self, criterion: FairseqObject, inputs: object, output: FairseqObject) -> None:
        super()._after_forward(criterion, inputs, output)
        if torch.is_grad_enabled():
            self.wrapped.adascale.begin_pass(0.0 if self._is_dummy else float(output[1]))
            if (
                output[0].requires_grad and not self._is_dummy
            ):  # a rank without a batch computes one that counts for nothing
                output[0].register_hook(lambda _: self._passes.add(torch._C._current_graph_task_id()))

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Measures the gain, then clips the gradients: at this point they are reduced, and not clipped yet."""
        self._check_passes()
        factor, loss_scale = scales(self.optimizer)
        self.wrapped.adascale.measure_sums(math.fsum(self._weights), factor, loss_scale)
        return super().clip_grad_norm(clip_norm)

    def _check_passes(self) -> None:
        adascale, batches = self.wrapped.adascale, self._batches
        passes = max(adascale.passes, len(self._passes))  # two losses may have no parameter in common
        if not adascale.due:
            return
        if passes > batches:
            raise ConfigurationError(
                f"adascale saw {passes} backward passes for {batches} batches: --task {self.cfg.task._name} "
                "calls backward for parts of a batch, and the differences between these would count as noise; give "
                "another --task or another --optimizer"
            )
        if adascale.passes < batches and not self._warned:
            self._warned = True
            logger.warning(
                "adascale saw %d backward passes for %d batches: a loss that is summed over batches before backward "
                "hides their noise, and the gain is too low; call backward for each batch",
                adascale.passes,
                batches,
            )

    def set_num_updates(self, num_updates: int) -> None:
        """Sets ``num_updates``; after a step that was taken, to the scale-invariant steps, not to fairseq's count."""
        if not self._in_step or self.wrapped.skip:
            return super().set_num_updates(num_updates)
        previous, steps = int(self.get_num_updates()), int(self.wrapped.adascale.scale_invariant_steps)
        Trainer.set_num_updates(self, steps)
        self._num_updates = AppliedUpdates(steps, previous)

    def _reduce_and_log_stats(
        self, logging_outputs: FairseqObject, sample_size: float, grad_norm: Tensor | None = None
    ) -> FairseqObject:
        if grad_norm is not None:
            whole = self.wrapped.adascale.gains.whole
            values = {
                "gain": self.wrapped.adascale.gain,
                "noise_scale": whole.noise_scale,
                "variance": whole.variance,
                "square_mean": whole.square_mean,
                "scale": whole.scale,
                "iterations": self.wrapped.adascale.steps,
            }
            for name, value in values.items():
                if math.isfinite(value):
                    metrics.log_scalar(name, value, weight=0, priority=600)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    def state_dict(self) -> StateDict:
        """Returns fairseq's checkpoint, in types that ``torch.load`` trusts."""
        self._num_updates = int(self._num_updates)  # torch.load trusts no type of ours
        return super().state_dict()


def _options_of(cfg: FairseqConfig) -> AdaScaleOptions:
    return flags.adascale_options(cfg.optimizer)


def _gradients(cfg: FairseqConfig) -> list[int]:
    """Returns the number of gradients in a step, of all ranks together, for each entry of ``--update-freq``."""
    return [cfg.distributed_training.distributed_world_size * each for each in cfg.optimization.update_freq]


def _masters(optimizer: FairseqOptimizer) -> Masters | None:
    masters = fp32_masters(optimizer)
    return None if masters is None else {parameter: (master, start) for parameter, master, start in masters}
