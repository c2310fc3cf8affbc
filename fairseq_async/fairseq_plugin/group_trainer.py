"""fairseq's trainer for methods that change the reduction or the step of its data-parallel group."""

import logging
from itertools import chain
from typing import Any

import torch
from fairseq.optim import FP16Optimizer
from fairseq.trainer import Trainer
from torch import Tensor

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.fairseq_plugin.trainer import filled, plain

logger = logging.getLogger(__name__)

_SKIPPED_IN_A_ROW = 10
_RANKS = "data_parallel_world_size"  # in a checkpoint's extra state


class GroupTrainer(Trainer):
    """What the synchronous methods share.

    A gradient with NaN or Inf does not end the run: all ranks see it in the norm of the reduced gradient, and skip the
    step together. With fp16 that is the loss scaler's business, as ever.
    """

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        self.arguments = cfg.optimizer
        self._given = plain(cfg)
        # rank 0 would send the others what it has read, in types that torch does not load without trust
        cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        self._skipped, self._in_step, self._dummy, self._drawn = 0, False, False, False
        self._weights: list[float] = []
        super().__init__(cfg, task, model, criterion, quantizer)
        self._criterion.register_forward_hook(self._see)

    @property
    def method(self) -> Any:
        """Our optimizer, round which fairseq may have put another for half precision."""
        optimizer = self.optimizer
        return optimizer.fp32_optimizer if isinstance(optimizer, FP16Optimizer) else optimizer

    def named(self) -> list[tuple[str, Tensor]]:
        """The trainable parameters, as the optimizer has them."""
        both = chain(self._model.named_parameters(), self._criterion.named_parameters())
        return [(name, parameter) for name, parameter in both if parameter.requires_grad]

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        """fairseq's place in the data is batches of one rank: another number of ranks goes on at the same batch."""
        try:
            extra_state = super().load_checkpoint(filename, *args, **kwargs)
        except AssertionError as error:
            raise ConfigurationError(f"{filename}: {error}") from error
        if extra_state is not None and _RANKS in extra_state:
            place = extra_state["train_iterator"]
            place["iterations_in_epoch"] *= extra_state[_RANKS]
            place["iterations_in_epoch"] //= self.data_parallel_world_size
        return extra_state

    def get_train_iterator(self, epoch: int, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`AsyncTrainer.get_train_iterator`: batches are made from the number of the epoch in which they are
        made, and the run that is resumed made its own in the first."""
        iterator = super().get_train_iterator(epoch, *args, **kwargs)
        first, self._drawn = not self._drawn, True
        made = self.task.dataset_to_epoch_iter
        if first and epoch > 1 and made.pop(self.task.dataset(self.cfg.dataset.train_subset), None) is not None:
            iterator = super().get_train_iterator(1, load_dataset=False)
        return iterator

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        self._in_step, self._weights = True, []
        try:
            return super().train_step(filled(samples) or samples[:1], raise_oom)
        finally:
            self._in_step = False

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> Any:
        prepared, self._dummy = super()._prepare_sample(sample, is_dummy)
        return prepared, self._dummy

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        """The criterion says how many tokens (or sentences) a batch has; one that fills up an epoch has none."""
        if torch.is_grad_enabled() and not self._dummy:
            self._weights.append(float(output[1]))

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """The norm of the reduced gradient; 0 where it is not finite, in place of the error that would end the run.

        Raises:
            AsyncError: that has happened in the last ten steps, or fp16's loss scale has come to its minimum.
        """
        try:
            norm: Tensor = super().clip_grad_norm(clip_norm)
        except FloatingPointError as error:
            raise AsyncError(str(error)) from error
        self.method.skip = not bool(torch.isfinite(norm))
        self._skipped = self._skipped + 1 if self.method.skip else 0
        if not self.method.skip:
            return norm
        logger.warning("the gradient has NaN or Inf: all ranks skip this step")
        if self._skipped >= _SKIPPED_IN_A_ROW:
            raise AsyncError(
                f"the gradients of the last {self._skipped} steps had NaN or Inf; try a lower --lr or --clip-norm"
            )
        return torch.zeros_like(norm)

    def set_num_updates(self, num_updates: int) -> None:
        """After a step that was skipped fairseq's count stays."""
        skipped = self._in_step and self.method.skip
        super().set_num_updates(self._num_updates if skipped else num_updates)

    def state_dict(self) -> dict[str, Any]:
        """fairseq's, in types that torch loads without trust."""
        checkpoint: dict[str, Any] = super().state_dict()
        checkpoint["cfg"] = self._given
        checkpoint["extra_state"][_RANKS] = self.data_parallel_world_size
        return checkpoint
