"""``--optimizer local_sgd``: fairseq's own optimizer on each worker, and an exchange with the server every H steps."""

import logging
import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from fairseq.logging import metrics
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer
from fairseq.utils import set_torch_seed
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags
from fairseq_async.fairseq_plugin.asynchronous_trainer import SEED_SPACING, AsynchronousTrainer
from fairseq_async.fairseq_plugin.compat.checkpoints import of_another_optimizer
from fairseq_async.fairseq_plugin.compat.muon import divide_for_muon
from fairseq_async.fairseq_plugin.compat.optimizers import betas_as_strings, trainable_parameters
from fairseq_async.fairseq_plugin.compat.precision import (
    finite_norm,
    forget_factor,
    fp32_masters,
    loss_scale_errors,
    skip_next_step,
)
from fairseq_async.fairseq_plugin.compat.types import FairseqObject, StateDict
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates
from fairseq_async.fairseq_plugin.session import attach
from fairseq_async.fairseq_plugin.shards import ShardedEpochs, sharded_batches
from fairseq_async.protocol import Welcome
from fairseq_async.worker.buffers import with_buffers
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import MasterReplica, Replica, TensorReplica

logger = logging.getLogger(__name__)


class LocalSGDFlags(FairseqOptimizer):
    """The flags of ``--optimizer local_sgd``; this optimizer is never built, since the trainer builds the inner one."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the method's flags; fairseq calls this for the optimizer that is chosen."""
        flags.add_server_method(parser, "local_sgd")
        attach(sys.modules)


def replica_of(named: list[tuple[str, Parameter]], optimizer: FairseqOptimizer, is_writer: bool) -> Replica:
    """Returns the parameters that fairseq's optimizer steps: its fp32 masters if it has any, else the model's own.

    Args:
        is_writer: whether this rank writes them for all of its worker, which have the same ones.
    """
    masters = fp32_masters(optimizer)
    if masters is None:
        return TensorReplica(named, is_writer)
    parts = [master.data.view(-1).narrow(0, start, parameter.numel()) for parameter, master, start in masters]
    return MasterReplica(named, [(0, part) for part in parts], is_writer)


class LocalSGDTrainer(AsynchronousTrainer):
    """The trainer of a ``local_sgd`` worker: fairseq's own optimizer steps, and every H steps are exchanged.

    ``num_updates`` is the mean number of local steps of the workers in the run so far: the learning-rate schedule and
    ``--max-update`` mean what they mean in a synchronous run. Worker 0 validates and saves the server's parameters, and
    its own inner optimizer's state, with which every worker of a resumed run begins.

    With ``--shards`` the learning-rate schedule follows the shard, which may be ahead of the run or behind it.
    """

    _worker: LocalSGDWorker | None = None

    @property
    def worker(self) -> LocalSGDWorker:
        assert self.optimizer is not None  # fairseq builds it when it is first asked for
        assert self._worker is not None
        return self._worker

    def _build_optimizer(self) -> None:
        arguments = self.session.arguments
        vars(arguments).update(betas_as_strings(arguments))
        arguments.optimizer = arguments.inner_optimizer  # fairseq builds the optimizer of this name
        divide_for_muon(trainable_parameters(self._model, self._criterion))
        try:
            super()._build_optimizer()
        finally:
            arguments.optimizer = "local_sgd"
        if self._worker is None:  # fairseq builds its optimizer anew for a checkpoint
            options = flags.local_sgd_options(arguments, self.cfg)
            self._worker = local_sgd_worker(self.session.client, self._replica(self._optimizer), options)
            self.loop = WorkerLoop(self._worker, self.session.context)
        self._in_step = self._overflow = False

    def load_checkpoint(
        self, filename: str, reset_optimizer: bool = False, *args: object, **kwargs: object
    ) -> StateDict | None:
        """Joins the run and loads a checkpoint as fairseq does; worker 0 brings its server state to a new server.

        With ``--reset-optimizer``, or for ``--finetune-from-model``, worker 0 brings the parameters alone: a new run.
        """
        if self._shards:  # the server chooses by their sizes, on which all workers must agree
            self._iterator = self._sharded_epochs()
            self.session.spec = replace(self.session.spec, shards=self._iterator.batches.sizes)
        welcome = self.worker.join(self.session.spec)
        before = self.optimizer
        extra_state = self.load_fairseq_checkpoint(welcome, filename, reset_optimizer, *args, **kwargs)
        if self.optimizer is before:
            self._build_optimizer()  # a half-precision model's masters still have the parameters before the load
        self.worker.replica = self._replica(self.optimizer)
        if not welcome.initialised:
            welcome = self._initialise(extra_state, reset_optimizer)
        elif extra_state is None and welcome.sequence:
            logger.warning("worker %d is back; its inner optimizer begins anew", self.session.context.worker)
        self.worker.begin(welcome)
        self.worker.restore_compressor((extra_state or {}).get("compressor"))
        if self.worker.finished or int(self.worker.progress) != self._num_updates:
            self.set_num_updates(int(self.worker.progress))  # which steps the schedule, that may count its steps
        return self.resume_data(extra_state, welcome.position)

    def _replica(self, optimizer: FairseqOptimizer) -> Replica:
        options = flags.local_sgd_options(self.session.arguments, self.cfg)
        is_writer = self.session.context.rank == 0
        replica = replica_of(self.trainable_parameters(), optimizer, is_writer)
        return with_buffers(replica, self._model, options, is_writer)

    def _initialise(self, extra_state: StateDict | None, reset_optimizer: bool) -> Welcome:
        state = None if reset_optimizer else (extra_state or {}).get("async_server")
        if extra_state is not None and state is None and not reset_optimizer:
            raise of_another_optimizer("local_sgd")
        if state is not None and self.cfg.checkpoint.reset_dataloader:
            state["positions"] = {}
            state["plan"]["epochs"] = 0.0
        return self.loop.bring(state, self.session.run_dir, from_checkpoint=extra_state is not None)

    # Data

    @property
    def _shards(self) -> int:
        return flags.local_sgd_options(self.session.arguments, self.cfg).shards

    def get_train_iterator(self, epoch: int, *args: object, **kwargs: object) -> FairseqObject:
        """Returns fairseq's iterator over this worker's part of the data, or epochs of shards from the server."""
        if not self._shards:
            return super().get_train_iterator(epoch, *args, **kwargs)
        if self._iterator is None:
            self._iterator = self._sharded_epochs()
        if self._position:
            self._iterator.load_state_dict(self._position)
            self._position = None
        return self._iterator

    def _sharded_epochs(self) -> ShardedEpochs:
        make = partial(Trainer.get_train_iterator, self)  # over the whole training set
        batches = sharded_batches(make, self.task, self.cfg, self._shards)
        return ShardedEpochs(batches, self.worker, self.session.context.workers, self.cfg.optimization.update_freq[0])

    # One local step, in the order of fairseq's train_step: _set_seed, clip_grad_norm, the optimizer's step,
    # set_num_updates, _reduce_and_log_stats

    def train_step(self, samples: Sequence[FairseqObject], raise_oom: bool = False) -> FairseqObject:
        """Takes one local step, from this worker's own parameters."""
        self._restore_own_parameters()
        self.loop.begin_step()
        self._in_step, self._overflow = True, False
        try:
            return super().train_step(samples, raise_oom)
        finally:
            self._in_step = False

    def _set_seed(self) -> None:
        """Seeds by the number of this worker's own step, which is fairseq's number of updates where it is alone."""
        own = SEED_SPACING * self.session.context.worker
        set_torch_seed(self.cfg.common.seed + own + self.worker.step_number)

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clips the local gradient, as in a synchronous run of one worker; a slowed-down worker waits here.

        A gradient with NaN or Inf is cleared, since the NaN or Inf would stay in the inner optimizer's moments. In fp16
        the loss scale was too large then: the batch is skipped, and no local step is counted.

        Raises:
            RefusedError: the last local steps had NaN or Inf.
            AsyncError: fp16's loss scale has come to its minimum.
            ConfigurationError: a parameter is trained that is not exchanged.
        """
        try:
            with loss_scale_errors():
                norm: Tensor = super().clip_grad_norm(clip_norm)
        except OverflowError as overflow:
            logger.info("gradient overflow, batch skipped, %s", overflow)
            skip_next_step(self.optimizer)
            self._in_step, self._overflow = False, True
            return torch.zeros(())
        self.loop.slowed_down()
        finite = bool(torch.isfinite(norm))
        self.loop.count_left_out(not finite)
        if not finite:
            self.zero_grad()
            forget_factor(self.optimizer)
        return finite_norm(norm)

    def set_num_updates(self, num_updates: int) -> None:
        """Sets ``num_updates`` to the run's progress."""
        if self._worker is None or not self._worker.joined:
            return super().set_num_updates(num_updates)
        if self._in_step:
            return None  # the step ends when its tokens are known, in _reduce_and_log_stats
        previous = int(self._num_updates)
        applied = self._applied_updates(max(previous, int(self.worker.run_progress)), previous)
        super().set_num_updates(int(applied))
        self._num_updates = applied

    def lr_step_update(self) -> float:
        """Steps the learning-rate schedule, by the shard's progress if the worker has a shard, else as fairseq does."""
        worker = self._worker
        if worker is None or worker.shard is None:
            return super().lr_step_update()
        counted, last = self._num_updates, (self.cfg.optimization.max_update or math.inf) - 1
        self._num_updates = int(min(worker.progress, last))
        try:
            return super().lr_step_update()
        finally:
            self._num_updates = counted

    def _end_step(self, loss: float, tokens: float) -> None:
        """Counts a local step, of which the loss is in nats per token, and sets the progress after it."""
        self._in_step = False
        self.worker.epochs += self.fraction_of_epoch()
        self.worker.tokens += tokens
        self.worker.step(time.perf_counter() - self.loop.began, loss, self.position())
        self.set_num_updates(int(self._num_updates))

    def _applied_updates(self, progress: int, previous: int) -> AppliedUpdates:
        """Returns the progress that fairseq's loop is to see.

        The loop ends when this number reaches ``max_update``, which the worker's progress does when the server has all
        local steps, and no sooner.
        """
        if self.worker.finished:
            progress = max(1, progress)  # a run may end before each worker has had a step, and 0 is no limit to fairseq
            self.cfg.optimization.max_update = progress
        return AppliedUpdates(progress, previous)

    def _reduce_and_log_stats(
        self, logging_outputs: Sequence[FairseqObject], sample_size: float, grad_norm: Tensor | None = None
    ) -> FairseqObject:
        if grad_norm is not None:
            if self._overflow:
                return None  # fairseq logs nothing of such a step
            loss = sum(float(output.get("loss", 0.0)) for output in logging_outputs)
            self._end_step(loss / max(1.0, float(sample_size)), float(sample_size))
            for name, value in self.worker.last.items():
                metrics.log_scalar(name, value, priority=600, round=3)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    # Worker 0 validates and saves the server's parameters, and goes on with its own afterwards

    def fetch_server_state(self) -> StateDict:
        return self.loop.state or self.loop.take_server_parameters(self.session.snapshot)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch with this worker's own parameters, which a task may change here.

        A task that validates other parameters may also put back here what was there before: then it finds them still.
        """
        if self.loop.changed() is None:
            self._restore_own_parameters()
        super().begin_epoch(epoch)

    def _restore_own_parameters(self) -> None:
        if name := self.loop.changed():
            raise ConfigurationError(
                f"{name} is not as the validation found it: something in this process changes parameters for a "
                "validation (a moving average, load_state_dict) and does not restore them. This worker continues with "
                "its own parameters, which would overwrite the change: restore them after the validation"
            )
        self.loop.give_back()

    def state_dict(self) -> StateDict:
        """Returns fairseq's checkpoint of the server's parameters, this worker's optimizer and the server's state."""
        state = self.fetch_server_state()
        self._num_updates = int(self._num_updates)  # torch.load trusts no type of ours
        checkpoint: StateDict = super().state_dict()
        checkpoint["extra_state"]["async_server"] = state
        compressor = self.worker.compressor_state()
        if compressor is not None:
            checkpoint["extra_state"]["compressor"] = compressor
        return checkpoint
