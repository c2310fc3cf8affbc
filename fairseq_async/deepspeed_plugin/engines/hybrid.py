"""DeepSpeed's engine as a worker of hybrid asynchronous SGD."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.deepspeed_plugin import server
from fairseq_async.deepspeed_plugin.compat import (
    count_step,
    drop_partitions,
    fill_gradients,
    is_raised_by_optimizer,
    manages_accumulation,
)
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.loss_scale import LossScale
from fairseq_async.deepspeed_plugin.engines.masters_in_server import (
    accept_state,
    answer_for_masters,
    check_scale,
    check_unhooked,
    refuse_moments,
    show_scale,
    wrapped,
)
from fairseq_async.deepspeed_plugin.engines.tensors import check_masters, trainable
from fairseq_async.deepspeed_plugin.engines.zero3 import PartitionedReplica, ShownGroups
from fairseq_async.deepspeed_plugin.schedules import NamedSchedule, show_rates
from fairseq_async.deepspeed_plugin.server_description import SCHEDULER, count_steps_as_torch, described
from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.method.spec import MethodSpec
from fairseq_async.pytorch.brought_state import (
    StateInServer,
    brought_state,
    check_brought,
    checksum_of_moments,
    warn_of_missing_moments,
)
from fairseq_async.pytorch.fsdp import norm_of_parts
from fairseq_async.pytorch.parameters import l2_norm, step_gradients
from fairseq_async.server.optimizers.learning_rates import (
    RateTable,
    StepSchedule,
    check_options,
    check_rates,
    check_table,
    check_unset_rates,
    present_options,
    present_rates,
    steps_taken,
)
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec
from fairseq_async.server.plan import whole_steps
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line

_LOSS_SCALE = "async_loss_scale"  # in the client state of a checkpoint


class HybridEngine(AsyncEngine):
    """The engine of hybrid asynchronous SGD: pushes gradients to the server, whose optimizer steps.

    The engine's own optimizer never steps; its parameter groups show the learning rates of the server's optimizer.

    Where the server divides the micro-batches of a step among the workers, ``gradient_accumulation_steps()`` is this
    worker's number in its present gradient, and ``train_batch_size()`` the number of their samples.

    Attributes:
        trained: number of micro-batches in the steps so far, where the server divides them; else 0.
    """

    async_worker: HybridWorker
    loss_scaler: LossScale
    optimizer: Any  # DeepSpeed's, or one that wraps it
    half_precision: torch.dtype | None = None  # the model's type, if it is in half precision
    _moments: StateInServer | None = None  # of the optimizer, once the worker has joined
    trained = 0
    divided: PartitionedReplica | None = None  # this rank's parts of the parameters, in ZeRO 3
    _shown: ShownGroups | None = None  # of the engine's own optimizer, likewise
    _has_gradient = False  # whether backward was called since the last step
    _served: torch.optim.Optimizer | None = None
    _share = 0  # number of micro-batches in the present gradient, where the server says it
    deals = False  # whether batches are drawn from training_data, which the server deals
    _first = _passes = 0  # micro_steps at its first one, and its calls of backward
    _saves = False  # whether the engine itself saves the optimizer, with the server's state beside it

    def set_up(
        self, async_worker: LocalSGDWorker | HybridWorker, spec: MethodSpec, context: WorkerContext, run_dir: Path
    ) -> None:
        """Sets the attributes of this class; see :meth:`AsyncEngine.set_up`."""
        super().set_up(async_worker, spec, context, run_dir)
        if not self.zero_optimization_partition_weights():
            answer_for_masters((parameter for _, parameter in trainable(self)), self.optimizer)
            show_scale(self.optimizer, self.loss_scaler, overflow=False)
            self.optimizer = wrapped(self.optimizer, self.config)
        else:
            refuse_moments(self.optimizer)
            self._shown = ShownGroups(self.optimizer.param_groups, self.served.param_groups)
        self._has_schedule = self.lr_scheduler is not None
        self._began = self._followed.state_dict()
        self._note_rates()
        self._check_rates()

    def _note_rates(self) -> None:
        """Notes the rates and options of the optimizer that the run's description has."""
        self._schedule: StepSchedule
        if SCHEDULER in self.spec.framework:
            self._schedule = NamedSchedule(self.served, self.lr_scheduler)
        else:
            self._schedule = RateTable(self.served, OptimizerSpec.from_json(self.spec.framework).learning_rates)
        self._rates, self._options = present_rates(self.served), present_options(self.served)

    @errors_in_one_line()
    def _check_masters(self) -> None:
        """Checks as :meth:`AsyncEngine._check_masters`; in ZeRO 3, DeepSpeed keeps masters beside the parameters."""
        if self.divided is not None:
            check_masters(self.divided)

    @errors_in_one_line()
    def _join(self, server_state: Path | None) -> None:
        """Joins as :meth:`AsyncEngine._join`, with what the optimizer and the schedule are now: they may have been
        loaded since ``initialize``. The moments that the optimizer has are the server's from then on."""
        as_made = self._followed.state_dict() == self._began and present_options(self.served) == self._options
        if not (as_made and SCHEDULER in self.spec.framework):
            self.spec = replace(self.spec, framework=described(self, self.served, self.spec.total_steps))
        self._note_rates()
        if server_state is None:
            check_brought(self.spec, [self.served])
            count_steps_as_torch(self.served)
            self.async_worker.details.moments = checksum_of_moments(trainable(self), [self.served])
        super()._join(server_state)
        self._begin_share()
        self._moments = self.served.state = StateInServer(dict)
        warn_of_missing_moments(self.served, "engine.save_checkpoint() in its place", lambda: self._saves)

    def _state_brought(self) -> State | None:
        """Returns the state of the optimizer, if it has stepped before; of an island's ranks, rank 0 brings it."""
        return None if self.context.rank else brought_state(self.spec, trainable(self), [self.served], server.build)

    def _check_without_optimizer(self) -> None:
        """Ends the process with one line: the optimizer's state is the server's, as the parameters are."""
        fail(
            "load_checkpoint(load_optimizer_states=False): with hybrid_async the optimizer goes on with the server's "
            "parameters; give load_module_only=True for a new run from the checkpoint's parameters"
        )

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Loads as :meth:`AsyncEngine.load_checkpoint`; one line for moments that belong to masters of DeepSpeed's."""
        if self.divided is not None:
            return self._load_divided(*args, **kwargs)
        kind, self.half_precision = self.half_precision, None  # else DeepSpeed loads an optimizer that has masters
        try:
            loaded = super().load_checkpoint(*args, **kwargs)
            self.loss_scaler.load_state_dict((loaded[1] or {}).pop(_LOSS_SCALE, {}))
            show_scale(self.optimizer, self.loss_scaler, overflow=False)  # which ZeRO 3 has not
            return loaded
        except (KeyError, AttributeError) as error:
            if not is_raised_by_optimizer(error):
                raise
            fail(
                "load_checkpoint: the checkpoint is of plain DeepSpeed in half precision or with ZeRO, whose moments "
                "hybrid_async cannot take: give load_module_only=True for a new run from its parameters"
            )
        finally:
            self.half_precision = kind

    def _load_divided(self, *args: Any, **kwargs: Any) -> Any:
        """Loads in ZeRO 3, after the run, as the best checkpoint; before, the process ends with one line."""
        if not self.finished:
            fail(
                'load_checkpoint: "zero_optimization": "stage": 3 with hybrid_async: load with "stage": 2, or go on '
                "with the run itself, by fairseq-async launch --resume"
            )
        accept_state(self.optimizer)
        return super().load_checkpoint(*args, **kwargs)

    def fp16_enabled(self) -> bool:
        """Whether the model is in fp16; scripts ask for it to round their batches."""
        return self.half_precision is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the model is in bf16; scripts ask for it to round their batches."""
        return self.half_precision is torch.bfloat16

    @property
    def served(self) -> torch.optim.Optimizer:
        """The optimizer that the server has, over whole parameters; in ZeRO 3, the engine's own has partitions."""
        own: torch.optim.Optimizer = self.optimizer
        return own if self._served is None else self._served

    def serve(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        """Leaves this optimizer to the server; in ZeRO 3 it is not the engine's, and this rank has partitions."""
        self._served = optimizer
        if self.zero_optimization_partition_weights():
            self.divided = PartitionedReplica(trainable(self), rank)

    # Shares by speed

    def gradient_accumulation_steps(self) -> int:
        return self._share or int(super().gradient_accumulation_steps())

    def train_batch_size(self) -> int:
        samples, average = int(super().train_batch_size()), int(super().gradient_accumulation_steps())
        return samples // average * self.gradient_accumulation_steps()

    def is_gradient_accumulation_boundary(self) -> bool:
        if not self._share or self._ends_by_script():
            return bool(super().is_gradient_accumulation_boundary())
        return self.micro_steps + 1 - self._first >= self._share

    def step(self, lr_kwargs: object = None) -> None:
        """Steps as :meth:`AsyncEngine.step`; the next gradient may have another number of micro-batches."""
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps > before:
            self._begin_share()

    def end(self, for_all: bool = False) -> None:
        """Ends as :meth:`AsyncEngine.end`. Micro-batches that a loop has left are sent first where they complete a step
        of the average number, which plain DeepSpeed would have taken."""
        if self._share and not (for_all or self.finished):
            rest, step = self.micro_steps - self._first, self.spec.micro_batches * (self.workers if self.deals else 1)
            first = (self.async_worker.first_micro_batch if self.deals else self.async_worker.drawn) or 0
            if first // step < (first + rest) // step:
                self._step_with(rest)
        super().end(for_all)

    def _step_with(self, rest: int) -> None:
        """Steps after fewer micro-batches, whose losses were divided by more."""
        for gradient in step_gradients(trainable(self)):
            gradient.mul_(self._share / rest)
        self._share = self.async_worker.micro_batches = rest
        self.allreduce_gradients()
        self._take_model_step(None)
        self._begin_share()

    def _begin_share(self) -> None:
        if self.spec.micro_batches:
            self.trained += self._passes
            self._share, self._first, self._passes = self.async_worker.micro_batches, self.micro_steps, 0

    def _ends_by_script(self) -> bool:
        return self._is_gradient_accumulation_boundary is not None or not manages_accumulation(self)

    def _check_share(self) -> None:
        """Checks that a script that says itself where a gradient ends, as accelerate does, knows the share.

        Raises:
            ConfigurationError: it does not.
        """
        if not self._share or not self._ends_by_script():
            return
        self._share = self.async_worker.micro_batches  # the Trainer's, which may have fewer left in its epoch
        if self._passes != self._share:
            raise ConfigurationError(
                f'a step after {self._passes} micro-batches, of which it has {self._share} by "shares": give "equal" '
                "there, or end a step after engine.gradient_accumulation_steps() of them"
            )

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> object:
        """Computes gradients as :meth:`AsyncEngine.backward`, in fp16 of the loss times its scale."""
        if (scale := self.loss_scaler.value) == 1.0:
            return super().backward(loss, *args, **kwargs)
        super().backward(loss * scale, *args, **kwargs)
        self._loss = loss.detach().clone()
        return loss

    def _backward_prologue(self) -> None:
        """Begins a backward pass, which a script may call as ``loss.backward()`` too; without ZeRO's optimizer, as in
        the stages up to 2, that ends the process with one line."""
        if self._running_engine_backward or self._support_torch_style_backward:
            super()._backward_prologue()
            return
        try:
            super()._backward_prologue()
        except RuntimeError:  # which names stage 0, whatever the stage
            fail(
                'loss.backward() on a loss of the engine: with hybrid_async and "zero_optimization": "stage" 0 to 2, '
                "call engine.backward(loss), which divides it by the micro-batches of a step"
            )

    def _backward_epilogue(self) -> None:
        """Ends a backward pass, whether ``engine.backward(loss)`` or ``loss.backward()`` has begun it."""
        self._passes += 1
        self._has_gradient = True
        super()._backward_epilogue()

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduces the gradients of a worker's ranks as DeepSpeed does, in the type of their sums."""
        if self.is_gradient_accumulation_boundary() and self.divided is None:
            fill_gradients(self)
        super().allreduce_gradients(*args, **kwargs)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduces the gradients of several passes once, as DeepSpeed's does with the optimizer of ZeRO, which there is
        none of in the stages up to 2."""
        if self.divided is not None:
            with super().coalesce_grad_reduction():
                yield
            return
        with self.no_sync():
            yield
        self.allreduce_gradients()

    def eval(self) -> object:
        """Begins an evaluation as DeepSpeed does, of the server's parameters: the model's may be ahead."""
        if self.async_worker.look_ahead:
            self.pull()
        return super().eval()

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> object:
        """Saves as :meth:`AsyncEngine.save_checkpoint`, with the server's parameters: the model's may be ahead."""
        if self.async_worker.look_ahead:
            self.pull()
        self._saves = True
        client_state = (client_state or {}) | {_LOSS_SCALE: self.loss_scaler.state_dict()}
        saved = super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)
        self._saves = False
        return saved

    @errors_in_one_line()
    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Exchanges with the server where DeepSpeed would step its optimizer, after the last micro-batch."""
        if self._is_past_the_end():
            return self._skip_step()
        self._check_followed()
        self._check_rates()
        self._check_trained()
        if self.divided is None:
            gradients = step_gradients(trainable(self))
        else:
            gradients = self.divided.gradients() if self._has_gradient else []
        self._has_gradient = False
        if not gradients:
            return self._skip_without_gradient()
        self._check_share()
        self.loop.slowed_down()
        factor = 1.0 / self.loss_scaler.value
        self.async_worker.write_ahead(factor)  # while the norm is measured
        norm = factor * (l2_norm(gradients) if self.divided is None else norm_of_parts(gradients))
        self._global_grad_norm = torch.tensor(norm)  # what get_global_grad_norm() gives, with item() as ZeRO's
        loss = None if self._loss is None else float(self._loss)
        skips = self.loss_scaler.skips(math.isfinite(norm))
        if self.divided is None:
            show_scale(self.optimizer, self.loss_scaler, overflow=not math.isfinite(norm))
        if skips:
            return self._skip_step()
        refused = self.async_worker.refusals.total
        self.async_worker.step(self.train_batch_size(), loss, norm, factor)
        self._set_learning_rates()
        applied = self.async_worker.refusals.total == refused
        drop_partitions(self)
        self.zero_grad()
        self.skipped_steps += not applied
        count_step(self, applied)
        self.loop.begin_step()
        self._log()

    def _check_rates(self) -> None:
        """Checks that the script does not change the optimizer's options, rates, state or step.

        Raises:
            ConfigurationError: it does.
        """
        if self._moments is not None:
            self._moments.check(self.served)
        check_options(self.served, self._options)
        if self._shown is not None:
            self._shown.check()
        else:
            check_scale(self.optimizer, self.loss_scaler)
        if isinstance(self._schedule, RateTable) and self._schedule.rates:
            check_table(self.lr_scheduler, steps_taken(self.lr_scheduler), self._schedule.rates)
        if self._has_schedule:
            check_unset_rates(self.served, self._rates, "leave it to the schedule, or give one with these rates")
        else:
            remedy = 'give a schedule as "scheduler" in the configuration, or as lr_scheduler='
            check_rates(self.served, self._rates, remedy)
        check_unhooked(self.optimizer, self.basic_optimizer)

    def _set_learning_rates(self) -> None:
        """Sets the learning rates as the server sets those of its optimizer."""
        self._schedule.follow(whole_steps(self.async_worker.progress))
        show_rates(self.lr_scheduler, self.served)
        self._rates = present_rates(self.served)
        if self._shown is not None:
            self._shown.show()
        self._followed.note()
