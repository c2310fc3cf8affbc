"""DeepSpeed's engine as a worker of hybrid asynchronous SGD."""

import time
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_async.deepspeed_plugin.compat import count_step
from fairseq_async.deepspeed_plugin.engine import AsyncEngine, ClientState
from fairseq_async.deepspeed_plugin.schedules import NamedSchedule
from fairseq_async.deepspeed_plugin.served import SCHEDULER
from fairseq_async.deepspeed_plugin.tensors import trainable
from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server.optimizers.learning_rates import (
    RateTable,
    StepSchedule,
    check_options,
    check_rates,
    present_options,
    present_rates,
)
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec
from fairseq_async.server.plan import whole_steps
from fairseq_async.torch.parameters import l2_norm, step_gradients
from fairseq_async.worker.context import WorkerContext
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.process import errors_in_one_line


class HybridEngine(AsyncEngine):
    """The engine of hybrid asynchronous SGD: pushes gradients to the server, whose optimizer steps.

    The engine's own optimizer never steps; its parameter groups show the learning rates of the server's optimizer.
    """

    async_worker: HybridWorker

    def set_up(
        self, async_worker: LocalSGDWorker | HybridWorker, spec: MethodSpec, context: WorkerContext, run_dir: Path
    ) -> None:
        """Sets the attributes of this class; see :meth:`AsyncEngine.set_up`."""
        super().set_up(async_worker, spec, context, run_dir)
        self._schedule: StepSchedule
        if SCHEDULER in spec.framework:
            self._schedule = NamedSchedule(self.optimizer, self.lr_scheduler)
        else:
            self._schedule = RateTable(self.optimizer, OptimizerSpec.from_json(spec.framework).learning_rates)
        self._has_schedule = self.lr_scheduler is not None
        self._rates, self._options = present_rates(self.optimizer), present_options(self.optimizer)
        self._check_rates()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, ClientState]:
        """Loads as :meth:`AsyncEngine.load_checkpoint`; learning rates and options are then those of the checkpoint."""
        loaded = super().load_checkpoint(*args, **kwargs)
        self._rates, self._options = present_rates(self.optimizer), present_options(self.optimizer)
        return loaded

    def _check_new_run(self) -> None:
        """Checks that the optimizer brings no moments to a new run, whose server begins without.

        Raises:
            ConfigurationError: it has stepped before.
        """
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        if any(isinstance(value, Tensor) and value.count_nonzero() for value in states):
            raise ConfigurationError(
                f"the {type(self.optimizer).__name__} has stepped before this run, whose server would begin without "
                "its moments: make it anew (load_checkpoint with load_module_only=True takes the parameters alone), or "
                "use local_sgd, which goes on with it"
            )

    def _check_without_optimizer(self) -> None:
        """Ends the process with one line: the optimizer's state is the server's, as the parameters are."""
        fail(
            "load_checkpoint(load_optimizer_states=False): with hybrid_async the optimizer goes on with the server's "
            "parameters; give load_module_only=True for a new run from the checkpoint's parameters"
        )

    def eval(self) -> object:
        """Begins an evaluation as DeepSpeed does, of the server's parameters: the model's may be ahead."""
        if self.async_worker.look_ahead:
            self.pull()
        return super().eval()

    def save_checkpoint(self, save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> object:
        """Saves as :meth:`AsyncEngine.save_checkpoint`, with the server's parameters: the model's may be ahead."""
        if self.async_worker.look_ahead:
            self.pull()
        return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    @errors_in_one_line()
    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Exchanges with the server where DeepSpeed would step its optimizer, after the last micro-batch."""
        if self._is_past_the_end():
            return self._skip_step()
        self._check_followed()
        self._check_rates()
        self._check_trained()
        gradients = step_gradients(trainable(self))
        if not gradients:
            return self._skip_without_gradient()
        self._sleep_if_slowed_down()
        self.async_worker.write_ahead()  # while the norm is measured
        norm, loss = l2_norm(gradients), None if self._loss is None else float(self._loss)
        refused = self.async_worker.refusals.total
        # the receipt of a gradient with NaN or Inf is waited for: an early one does not say that it was refused
        self.async_worker.step(self.train_batch_size(), loss, wait=not norm < inf, norm=norm)
        self._set_learning_rates()
        applied = self.async_worker.refusals.total == refused
        self.zero_grad()
        self.skipped_steps += not applied
        count_step(self, applied)
        self._step_ended = time.perf_counter()
        self._log()

    def _check_rates(self) -> None:
        """Checks that the script does not change the optimizer's options, nor the learning rates where the server has
        no schedule.

        Raises:
            ConfigurationError: it does.
        """
        check_options(self.optimizer, self._options)
        if not self._has_schedule:
            remedy = 'give a schedule as "scheduler" in the configuration, or as lr_scheduler='
            check_rates(self.optimizer, self._rates, remedy)

    def _set_learning_rates(self) -> None:
        """Sets the learning rates as the server sets those of its optimizer."""
        self._schedule.follow(whole_steps(self.async_worker.progress))
        self._followed.note()
