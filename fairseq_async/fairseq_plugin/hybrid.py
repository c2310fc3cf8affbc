"""``--optimizer hybrid_async``: the trainer of a worker, whose optimizer steps in the server."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.utils import set_torch_seed
from torch import Tensor

from fairseq_async.fairseq_plugin.asynchronous_trainer import SEED_SPACING, AsynchronousTrainer
from fairseq_async.fairseq_plugin.compat.dealt import DEALT, DealtEpochs, can_be_dealt
from fairseq_async.fairseq_plugin.compat.precision import loss_scaler
from fairseq_async.fairseq_plugin.compat.types import FairseqObject, StateDict
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates, RemoteSchedule
from fairseq_async.fairseq_plugin.flags import check_cut
from fairseq_async.fairseq_plugin.hybrid_optimizer import HybridAsync, step_error
from fairseq_async.protocol import Report
from fairseq_async.server.plan import whole_steps
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.loop import WorkerLoop

__all__ = ["HybridAsync", "HybridTrainer"]


class HybridTrainer(AsynchronousTrainer):
    """The trainer of a ``hybrid_async`` worker.

    ``num_updates`` is the number of the server's whole steps, which is its version where no step is partial.
    """

    _server_state: StateDict | None = None  # the state that was validated or saved, until the next step
    _own_part = False  # whether the run goes on from one in which each worker had its part of the data
    _group: Sequence[FairseqObject] = ()  # of the step's batches, where their number changes, those that were drawn

    @property
    def worker(self) -> HybridWorker:
        worker: HybridWorker = self.optimizer.worker
        return worker

    def _note_tokens(self, criterion: FairseqObject, inputs: object, output: FairseqObject) -> None:
        if torch.is_grad_enabled():
            self.optimizer.tokens.append(output[1])

    def _build_optimizer(self) -> None:
        if getattr(self, "_optimizer", None) is not None:
            return  # fairseq builds it anew for a checkpoint, but this one has joined the run already
        arguments = self.session.arguments
        self._optimizer = HybridAsync(
            arguments,
            self.trainable_parameters(),
            self.session.client,
            loss_scaler(self.cfg) if self.cfg.common.fp16 else None,
            self.session.spec.full_rounds,
            type(self.task).optimizer_step is not FairseqTask.optimizer_step,
            self.session.context,
        )
        self._lr_scheduler = RemoteSchedule(None, self._optimizer)
        self._criterion.register_forward_hook(self._note_tokens)
        self.loop = WorkerLoop(self._optimizer.worker, self.session.context)

    def load_checkpoint(self, filename: str, *args: object, **kwargs: object) -> StateDict | None:
        """Joins the run and loads a checkpoint as fairseq does; worker 0 brings its server state to a new server."""
        checkpoint = self.cfg.checkpoint
        welcome = self.worker.join(self.session.spec)
        extra_state = self.load_fairseq_checkpoint(welcome, filename, *args, **kwargs)
        if not welcome.initialised:
            self.optimizer.reset_restored(checkpoint.reset_lr_scheduler, checkpoint.reset_dataloader)
            welcome = self.loop.bring(self.optimizer.restored, self.session.run_dir, extra_state is not None)
        self.optimizer.start_from(welcome)
        self.set_num_updates(self._updates)
        keeps = not (checkpoint.reset_dataloader or filename == checkpoint.finetune_from_model)
        position = welcome.position or (extra_state or {}).get("train_iterator") if keeps else welcome.position
        self._own_part = position is not None and DEALT not in position
        return self.resume_data(extra_state, welcome.position)

    def get_train_iterator(self, epoch: int, *args: object, **kwargs: object) -> FairseqObject:
        """Returns fairseq's iterator over this worker's part, of which no sentence is left out for a cut batch; or
        epochs of the batches that the server deals."""
        if isinstance(self._iterator, DealtEpochs):
            return self._iterator
        try:
            return super().get_train_iterator(epoch, *args, **kwargs)
        finally:  # fairseq fails where no sentence is left
            check_cut(self.session.arguments, self.cfg, self.task.datasets.get(self.cfg.dataset.train_subset))

    def _in_order(self, iterator: FairseqObject) -> FairseqObject:
        cached = self.task.dataset_to_epoch_iter.get(self.task.dataset(self.cfg.dataset.train_subset)) is iterator
        if self.worker.first_micro_batch is None or self._own_part or not self.session.can_deal:
            return iterator
        if not can_be_dealt(iterator, cached):
            return iterator
        workers, average = self.session.context.workers, self.session.spec.micro_batches
        return DealtEpochs(iterator, self.worker, workers, average, self.cfg.dataset.curriculum)

    # One step, in the order of fairseq's train_step: _set_seed, _prepare_sample for each batch, clip_grad_norm, the
    # optimizer's step, set_num_updates, _reduce_and_log_stats

    def train_step(self, samples: Sequence[FairseqObject], raise_oom: bool = False) -> FairseqObject:
        """Takes one step as fairseq does, and notes what the server is to record of it.

        Where the server divides the batches of a step among the workers, fairseq draws them one by one, and the step is
        taken with the last of them, or with the last of the epoch; before it, this is a step that does not count.
        """
        if number := self.worker.micro_batches:
            self._group = [*self._group, *samples]
            if len(self._group) < number and not self._iterator.end_of_epoch():
                self._num_updates = AppliedUpdates(self._num_updates, self._num_updates)
                return None
            samples, self._group = self._group, ()
        if self._server_state is not None:  # others went on while this worker validated and saved
            self.worker.check_unchanged()
            self._server_state = None
            self.worker.start()
        self.loop.begin_step()
        return super().train_step(samples, raise_oom)

    def _summed(self) -> list[FairseqObject]:
        return [*super()._summed(), reduce(add, self.optimizer.losses, torch.zeros((), device=self.device))]

    def _take_sums(self, sample_size: FairseqObject, drawn: FairseqObject, *others: FairseqObject) -> None:
        super()._take_sums(sample_size, drawn)
        self.optimizer.tokens, self.optimizer.losses = [float(sample_size)], [*others]
        self.optimizer.dummy = not self._drawn

    def cumulative_training_time(self) -> float:
        """Returns the time by which --stop-time-hours ends training; 0 while a step's batches are drawn."""
        return 0.0 if self._group else float(super().cumulative_training_time())

    def _set_seed(self) -> None:
        """Seeds by the number of this worker's updates, since the version may stay the same for several batches.

        Workers that step together take the same dropout masks, as fairseq's ranks do.
        """
        spec = self.session.spec
        shared = spec.framework["synchronous"] or spec.closes_early
        own = 0 if shared else SEED_SPACING * self.session.context.worker
        set_torch_seed(self.cfg.common.seed + own + self.worker.sequence)

    def _prepare_sample(self, sample: FairseqObject, is_dummy: bool = False) -> tuple[FairseqObject, bool]:
        prepared, self.optimizer.dummy = super()._prepare_sample(sample, is_dummy)
        return prepared, self.optimizer.dummy

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Returns the gradient's norm. Just before the push, a slowed-down worker waits here: its gradient gets old."""
        norm: Tensor = super().clip_grad_norm(clip_norm)
        self.optimizer.report = Report(self.position(), self.fraction_of_epoch())
        self.loop.slowed_down()
        return norm

    def set_num_updates(self, num_updates: int) -> None:
        """Sets ``num_updates``; once this worker has joined, to the server's steps, whatever fairseq has counted."""
        if not self.worker.joined:
            return super().set_num_updates(num_updates)
        applied = self._applied_updates()
        super().set_num_updates(int(applied))
        self._num_updates = applied
        if 0 < self.cfg.optimization.max_update <= applied and not self.worker.finished:
            self.worker.pull()  # fairseq's loop ends here, and the parameters that it has may be ahead of the server's

    @property
    def _updates(self) -> int:
        return whole_steps(self.worker.progress)

    def _applied_updates(self) -> AppliedUpdates:
        updates, previous = self._updates, int(self._num_updates)
        if self.worker.finished:
            updates = max(1, updates)  # a run may end before its first whole step, and 0 is no limit to fairseq
            self.cfg.optimization.max_update = updates  # fairseq's loop ends at this number
            return AppliedUpdates(updates, previous)
        # fairseq puts this number into a checkpoint's name: take the multiple of the interval that was passed.
        interval = self.cfg.checkpoint.save_interval_updates
        multiple = updates - updates % interval if interval > 0 else 0
        return AppliedUpdates(multiple if multiple > previous else updates, previous)

    def _reduce_and_log_stats(
        self, logging_outputs: FairseqObject, sample_size: float, grad_norm: Tensor | None = None
    ) -> FairseqObject:
        if grad_norm is not None:
            if self.optimizer.awaits_step:
                raise step_error("the task's optimizer_step has not called optimizer.step()")
            last = self.worker.last
            metrics.log_scalar("staleness", last["staleness"], priority=600, round=2)
            for name in ("push", "pull"):
                metrics.log_scalar(f"{name}_ms", 1000 * last[f"{name}_seconds"], priority=610, round=2)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    # Worker 0 validates and saves the server's parameters

    def fetch_server_state(self) -> StateDict:
        if self._server_state is None:
            self.worker.check_unchanged()
            self._server_state = self.session.snapshot()
            self.worker.take_state(self._server_state["server"])
        return self._server_state

    def state_dict(self) -> StateDict:
        """Returns the checkpoint with the server's state as the optimizer's."""
        state = self.fetch_server_state()
        seen, self._num_updates = self._num_updates, self._updates
        checkpoint: StateDict = super().state_dict()
        self._num_updates = seen  # the server may have passed an interval's multiple, which the next step is to see
        if "last_optimizer_state" in checkpoint:
            checkpoint["last_optimizer_state"] |= state
        return checkpoint
