"""``--optimizer hybrid_async``: each step of a worker sends a gradient to the server, where the optimizer steps."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add

import torch
from fairseq.logging import metrics
from fairseq.optim import FairseqOptimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.tasks import FairseqTask
from fairseq.utils import set_torch_seed
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.fairseq_plugin import flags
from fairseq_async.fairseq_plugin.asynchronous_trainer import SEED_SPACING, AsynchronousTrainer
from fairseq_async.fairseq_plugin.compat.checkpoints import of_another_optimizer
from fairseq_async.fairseq_plugin.compat.precision import finite_norm, loss_scaler, overflows
from fairseq_async.fairseq_plugin.compat.remote_optimizer import RemoteOptimizer, clip_error, step_error
from fairseq_async.fairseq_plugin.compat.types import FairseqObject, StateDict
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates, RemoteSchedule
from fairseq_async.fairseq_plugin.session import attach
from fairseq_async.protocol import Report, Welcome
from fairseq_async.server.plan import whole_steps
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.start.context import WorkerContext

_NO_TOKENS = 1e-9  # weight of batches without a target token: they move no mean, and alone they step as in fairseq


class HybridAsync(FairseqOptimizer):
    """An optimizer that sends gradients to the server and takes parameters from it.

    The inner optimizer steps in the server, in fp32. The fp32 masters of a half-precision model are the server's
    parameters, so no copy of them is kept here. Checkpoints hold the name of this class, by which fairseq knows them.

    Args:
        named: the model's trainable parameters with their names.
        client: the connection to the server.
        scaler: the dynamic loss scale of an fp16 model.
        barrier: whether the server answers only when the step is taken.
        changes_gradients: whether the task may change gradients after fairseq has clipped them.
        context: which rank of which worker this is.

    Attributes:
        worker: the worker side of the method, which has the parameters and exchanges them.
        report: the data about the next update that goes to ``events.jsonl``.
        dummy: whether the present batch is a dummy, which only fills up an epoch.
        tokens, losses: what the criterion says that the batches of this step have; or their sums over the ranks.
        restored: a checkpoint's state, with the server's in it, until this worker joins.
    """

    def __init__(
        self,
        cfg: Namespace,
        named: Sequence[tuple[str, Parameter]],
        client: ServerConnection,
        scaler: DynamicLossScaler | None,
        barrier: bool,
        changes_gradients: bool = False,
        context: WorkerContext = WorkerContext(),  # noqa: B008  it is frozen
    ) -> None:
        super().__init__(cfg)
        self.scaler, self.barrier = scaler, barrier
        # FP16Optimizer, which steps fp32 masters without this method, has zeros for missing gradients
        zeros = scaler is not None or any(p.dtype is torch.bfloat16 for _, p in named)
        self.worker, self._ranks = HybridWorker(client, named, zeros, context.rank == 0), context.island_size
        self._clips, self._changes_gradients = cfg.clip_norm > 0, changes_gradients
        self._scales_into_slot = context.island_size == 1 and all(
            p.is_cpu and p.dtype is torch.float32 for _, p in named
        )
        self._optimizer = RemoteOptimizer([p for _, p in named], cfg.lr[0], self._exchange)
        self.report = Report()
        self.dummy = False
        self.restored: StateDict | None = None
        self._norm: float | None = None  # from the clipping to the step
        self._reset_step()

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the method's flags; fairseq calls this for the optimizer that is chosen."""
        flags.add_server_method(parser, "hybrid_async")
        attach(sys.modules)

    # What fairseq's trainer calls in one step, in its order. Ranks of a worker reduce before multiply_grads.

    def zero_grad(self) -> None:
        """Clears the gradients, and begins a step."""
        super().zero_grad()
        self._reset_step()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of one batch; called once for each batch of the step."""
        self.losses.append(loss.detach())  # read when the step is over: a GPU would be waited for
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiplies the gradients by ``c``, which is ranks / tokens; the update's weight is these tokens.

        Gradients in half precision, or on a GPU, are multiplied on their way into the slot, in fp32. A task may
        multiply them too: the last call before fairseq clips is the trainer's.
        """
        if self._norm is None:
            no_tokens = self.tokens and not any(map(float, self.tokens))  # fairseq divides by 1 then
            weight = self._ranks / float(c)
            self._weight = 0.0 if self.dummy else _NO_TOKENS if no_tokens else round(weight, 9) or weight
        if self._scales_into_slot:
            return self.worker.scale_into_slot(float(c))
        self._factor *= float(c)
        if self._is_sent:
            self.worker.write_ahead(self._factor)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the norm of this worker's gradient for the log, and clips nothing: the server clips the mean.

        A norm that is not finite does not end the run: the server refuses the update, or the loss scale was too large
        and the batch is skipped.

        Raises:
            ConfigurationError: the task clips too.
        """
        if self._norm is not None:
            raise clip_error("the task calls optimizer.clip_grad_norm beside fairseq's trainer")
        norm: Tensor = self._factor * super().clip_grad_norm(0.0)
        self._skip = self.scaler is not None and overflows(self.scaler, norm)
        self._norm = float(norm)
        return finite_norm(norm)

    def step(self, closure: object = None, scale: float = 1.0, groups: object = None) -> None:
        """Pushes the mean gradient, waits for the receipt and pulls the parameters if they have changed.

        Raises:
            ConfigurationError: the task does what the server would not take over.
            AsyncError: the last updates had NaN or Inf; or the server is gone, and this update may be lost.
        """
        if scale != 1.0:
            self.multiply_grads(1.0 / scale)
        self._optimizer.step(closure)

    def _exchange(self) -> None:
        self._check_clipping()
        norm, self._norm = self._norm, None
        if self._skip or not self._is_sent:
            return
        report = replace(self.report, loss=self._mean_loss())
        self.worker.exchange(partial(self.worker.write, factor=self._factor), self._weight, report, norm)
        for parameter in self.params:
            parameter.grad = None  # it may lie in the slot, which is the server's now
        self.take_rate(self.worker.learning_rate)
        if self.scaler is not None:
            self.scaler.update()

    def _check_clipping(self) -> None:
        if self._norm is None:
            raise step_error("the task calls optimizer.step() beside fairseq's trainer")
        if self._clips and (self._changes_gradients or self._optimizer.has_hooks) and not self._skip:
            norm = float(self._factor * super().clip_grad_norm(0.0))
            if math.isfinite(self._norm) and not math.isclose(norm, self._norm, rel_tol=1e-4):
                changed = "the task's optimizer_step, or a hook before optimizer.step(), changes gradients"
                raise clip_error(f"--clip-norm {self.cfg.clip_norm:g}: {changed}")

    @property
    def awaits_step(self) -> bool:
        """Whether there is a gradient that was clipped and not stepped."""
        return self._norm is not None

    def take_rate(self, lr: float) -> None:
        """Takes the server's learning rate, for fairseq's log."""
        self._optimizer.take_rate(lr)

    # The server's state

    def start_from(self, welcome: Welcome) -> None:
        """Starts from the server's parameters, and from the server's count of this worker's earlier updates."""
        self.worker.begin(welcome)
        self.worker.restore_compressor((self.restored or {}).get("compressor"))
        self.restored = None
        self.take_rate(self.worker.learning_rate)

    def load_state_dict(self, state_dict: StateDict, optimizer_overrides: StateDict | None = None) -> None:
        """Keeps a checkpoint's server state until this worker joins; the server has the overrides from the method's
        description, since it may go on from a snapshot of its own.

        Raises:
            ConfigurationError: ``state_dict`` is not of a ``hybrid_async`` run.
        """
        if "server" not in state_dict:
            raise of_another_optimizer("hybrid_async")
        if self.scaler is not None and "loss_scale" in state_dict:
            self.scaler.loss_scale = state_dict["loss_scale"]
        self.restored = state_dict

    def reset_restored(self, schedule: bool, positions: bool) -> None:
        """Drops from a checkpoint's server state what --reset-lr-scheduler and --reset-dataloader reset."""
        if self.restored is not None and schedule:
            self.restored["server"]["rule"]["schedule"] = None
        if self.restored is not None and positions:
            self.restored |= {"positions": {}, "plan": {"epochs": 0.0}}

    def state_dict(self) -> StateDict:
        """Returns the state that only this worker holds; the trainer adds what it has fetched from the server."""
        scale = {} if self.scaler is None else {"loss_scale": self.scaler.loss_scale}
        compressor = self.worker.compressor_state()
        return scale if compressor is None else scale | {"compressor": compressor}

    # What fairseq asks of every optimizer

    @property
    def optimizer_config(self) -> dict[str, float]:
        return {"lr": self.cfg.lr[0]}

    @property
    def supports_flat_params(self) -> bool:
        return True

    def _reset_step(self) -> None:
        self._factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)
        self._weight, self._skip = 0.0, False
        self._norm = None
        self.losses: list[Tensor] = []
        self.tokens: list[float | Tensor] = []

    @property
    def _is_sent(self) -> bool:
        """Whether this step's gradient goes to the server.

        A dummy's gradient goes only behind a barrier, with weight 0: the others wait for every worker's update.
        """
        return self.barrier or not self.dummy

    def _mean_loss(self) -> float:
        """Returns the step's loss in nats per target token, as the criterion computes it; fairseq's log has bits."""
        total = reduce(add, map(float, self.losses), 0.0)
        return total / self._weight if self._weight > _NO_TOKENS else 0.0


class HybridTrainer(AsynchronousTrainer):
    """The trainer of a ``hybrid_async`` worker.

    ``num_updates`` is the number of the server's whole steps, which is its version where no step is partial.
    """

    _server_state: StateDict | None = None  # the state that was validated or saved, until the next step
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
        return self.resume_data(extra_state, welcome.position)

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
        self.optimizer.report = Report(self._iterator.state_dict(), self.fraction_of_epoch())
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
