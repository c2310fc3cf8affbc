"""The base of the synchronous methods: an optimizer round another, and a trainer whose ranks skip steps together."""

import logging
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import AsyncError
from fairseq_async.fairseq_plugin.compat.batches import batches_of_first_epoch, real_batches
from fairseq_async.fairseq_plugin.compat.checkpoints import (
    checkpoint_errors,
    load_on_every_rank,
    make_plain,
    plain_config,
    rescale_position,
)
from fairseq_async.fairseq_plugin.compat.optimizers import build_inner, trainable_parameters
from fairseq_async.fairseq_plugin.compat.precision import finite_norm, innermost, loss_scale_errors
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict

logger = logging.getLogger(__name__)

_MAX_SKIPPED = 10  # steps in a row


class WrappedOptimizer(FairseqOptimizer):
    """An optimizer round the one that ``--inner-optimizer`` names, to which it passes everything on.

    Attributes:
        skip: whether this step is left out.
    """

    def __init__(self, args: Namespace, params: Iterable[Parameter]) -> None:
        super().__init__(args)
        self.skip = False
        self.inner = build_inner(args, list(params))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.inner.optimizer

    @property
    def optimizer_config(self) -> dict[str, object]:
        return dict(self.inner.optimizer_config)

    def __getstate__(self) -> StateDict:
        state: StateDict = self.inner.__getstate__()
        return state

    def load_state_dict(self, state_dict: StateDict, optimizer_overrides: StateDict | None = None) -> None:
        """Restores the inner optimizer."""
        self.inner.load_state_dict(state_dict, optimizer_overrides)

    def step(self, closure: object = None, scale: float = 1.0, groups: object = None) -> None:
        """Steps the inner optimizer, unless the step is skipped."""
        if not self.skip:
            self.inner.step(closure, scale, groups)

    @property
    def supports_flat_params(self) -> bool:
        return bool(self.inner.supports_flat_params)


class SynchronousTrainer(Trainer):
    """fairseq's trainer for methods that change the reduction or the step of its data-parallel group.

    A gradient with NaN or Inf does not end the run: all ranks see it in the norm of the reduced gradient, and skip the
    step together. With fp16 the loss scaler does so, as in plain fairseq.
    """

    def __init__(
        self,
        cfg: FairseqConfig,
        task: FairseqObject,
        model: FairseqObject,
        criterion: FairseqObject,
        quantizer: FairseqObject = None,
    ) -> None:
        self.arguments: Namespace = cfg.optimizer
        self._given = plain_config(cfg)
        load_on_every_rank(cfg)
        self._skipped = 0  # steps in a row
        self._in_step, self._is_dummy, self._has_iterator = False, False, False
        self._weights: list[float] = []  # of the step's batches on this rank
        super().__init__(cfg, task, model, criterion, quantizer)
        self._criterion.register_forward_hook(self._after_forward)

    @property
    def wrapped(self) -> FairseqObject:
        """The method's :class:`WrappedOptimizer`."""
        return innermost(self.optimizer)

    def trainable_parameters(self) -> list[tuple[str, Parameter]]:
        """Returns the parameters that the optimizer has, with their names in the model without DDP's wrapper."""
        return trainable_parameters(self._model, self._criterion)

    # Data and checkpoints

    def get_train_iterator(self, epoch: int, *args: object, **kwargs: object) -> FairseqObject:
        """Returns fairseq's iterator; a resumed run makes the same batches as the run before."""
        make = super().get_train_iterator
        iterator = make(epoch, *args, **kwargs)
        first, self._has_iterator = not self._has_iterator, True
        if not first or epoch == 1:
            return iterator
        remade = batches_of_first_epoch(self.task, self.cfg, partial(make, 1, load_dataset=False))
        return iterator if remade is None else remade

    def load_checkpoint(self, filename: str, *args: object, **kwargs: object) -> StateDict | None:
        """Loads a checkpoint as fairseq does; a run with another number of ranks goes on at the same batch."""
        with checkpoint_errors(filename):
            extra_state: StateDict | None = super().load_checkpoint(filename, *args, **kwargs)
        if extra_state is not None:
            rescale_position(extra_state, self.data_parallel_world_size)
        return extra_state

    def state_dict(self) -> StateDict:
        """Returns fairseq's checkpoint, in types that ``torch.load`` trusts."""
        return make_plain(super().state_dict(), self._given, self.data_parallel_world_size)

    # One step, in the order of fairseq's train_step: for each batch _prepare_sample and the forward pass; then
    # _aggregate_logging_outputs, all_reduce_grads, clip_grad_norm, the optimizer's step, set_num_updates

    def train_step(self, samples: Sequence[FairseqObject], raise_oom: bool = False) -> FairseqObject:
        """Takes one step as fairseq does, on the batches that are no dummies."""
        self._in_step, self._weights = True, []
        try:
            return super().train_step(real_batches(samples) or samples[:1], raise_oom)
        finally:
            self._in_step = False

    def _prepare_sample(self, sample: FairseqObject, is_dummy: bool = False) -> tuple[FairseqObject, bool]:
        prepared, self._is_dummy = super()._prepare_sample(sample, is_dummy)
        return prepared, self._is_dummy

    def _after_forward(self, criterion: FairseqObject, inputs: object, output: FairseqObject) -> None:
        """Notes how many tokens (or sentences) the criterion says that the batch has; a dummy has none."""
        if torch.is_grad_enabled() and not self._is_dummy:
            self._weights.append(float(output[1]))

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clips the reduced gradient and returns its norm; if the norm is not finite, all ranks skip the step.

        Raises:
            AsyncError: the last ten steps were skipped so, or fp16's loss scale has come to its minimum.
        """
        with loss_scale_errors():
            norm: Tensor = super().clip_grad_norm(clip_norm)
        self.wrapped.skip = not bool(torch.isfinite(norm))
        self._skipped = self._skipped + 1 if self.wrapped.skip else 0
        if self._skipped:
            logger.warning("the gradient has NaN or Inf: all ranks skip this step")
        if self._skipped >= _MAX_SKIPPED:
            raise AsyncError(
                f"the gradients of the last {self._skipped} steps had NaN or Inf; try a lower --lr or --clip-norm"
            )
        return finite_norm(norm)

    def set_num_updates(self, num_updates: int) -> None:
        """Sets fairseq's count of updates; a step that was skipped leaves it as it is."""
        skipped = self._in_step and self.wrapped.skip
        super().set_num_updates(self._num_updates if skipped else num_updates)
