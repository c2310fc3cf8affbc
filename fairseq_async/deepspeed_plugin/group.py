"""What DeepSpeed's engine has in common for the synchronous methods, whose ranks are one group without a server."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from fairseq_async.collective.agreement import check_equal
from fairseq_async.deepspeed_plugin import gradients
from fairseq_async.errors import AsyncError, fail
from fairseq_async.worker.config import AdaScaleOptions, AdasumOptions
from fairseq_async.worker.place import Place

logger = logging.getLogger(__name__)

_SKIPPED_IN_A_ROW = 10


class GroupEngine(DeepSpeedEngine):
    """An engine that was made by ``deepspeed.initialize``.

    A step whose gradient has NaN or Inf on one rank is skipped by all.

    Attributes:
        worker: this rank; rank 0 is to validate.
        place: the same, as asynchronous workers have it.
        progress: steps of the run so far.
        finished: whether they are ``total_steps``.
    """

    options: AdasumOptions | AdaScaleOptions

    def enter(self, options: Any) -> None:
        """Becomes a member of the group.

        Raises:
            ConfigurationError: the configuration does not go with the method, or the ranks differ.
        """
        self.options, self.worker, self._bad_in_a_row = options, dist.get_rank(), 0
        self.place = Place(self.worker, dist.get_world_size())
        if hasattr(self.optimizer, "check_grad_overflow"):
            self.optimizer.check_grad_overflow = True  # ZeRO looks for NaN by itself, with bf16 only if it is told to
        self._check_equal()

    @property
    def progress(self) -> float:
        return self.global_steps - self.skipped_steps

    @property
    def finished(self) -> bool:
        return self.options.total_steps > 0 and self.progress >= self.options.total_steps

    def pull(self) -> None:
        """All ranks have the same parameters already."""

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        self._calling(self._check_equal)
        return loaded

    def _check_equal(self) -> None:
        check_equal([(name, each) for name, each in self.module.named_parameters() if each.requires_grad])

    def _skips(self, bad: bool) -> bool:
        """Whether this step is not to be taken, after all ranks have found the same.

        Raises:
            AsyncError: that was so in the last ten steps.
        """
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        if bad:
            logger.warning("the gradient has NaN or Inf: all ranks skip this step")
        if self._bad_in_a_row >= _SKIPPED_IN_A_ROW and not self.fp16_enabled():
            raise AsyncError(f"the gradients of the last {self._bad_in_a_row} steps had NaN or Inf; try a lower lr")
        if not bad or gradients.has_own_check(self.optimizer):
            return False
        self.zero_grad()
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_applied = False
        return True

    def _calling(self, call: Any, *arguments: Any) -> Any:
        """A mistake of the user's ends the process with one line, not with a traceback."""
        try:
            return call(*arguments)
        except AsyncError as error:
            fail(error)


def finite(tensors: list[Tensor]) -> bool:
    """Whether there is no NaN and no Inf in them."""
    norms = torch._foreach_norm(tensors, torch.inf)
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is set on one rank at least; all ranks must ask."""
    number = torch.tensor([float(flag)], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)
