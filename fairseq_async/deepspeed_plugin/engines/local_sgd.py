"""DeepSpeed's engine as a worker of local SGD."""

from pathlib import Path
from typing import Any, NoReturn

from fairseq_async.deepspeed_plugin.compat import check_overflow_always, lower_loss_scale, may_overflow
from fairseq_async.deepspeed_plugin.engines import tensors
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.schedules import FollowedSchedule
from fairseq_async.errors import fail
from fairseq_async.method.spec import MethodSpec
from fairseq_async.pytorch.schedules import OwnRates
from fairseq_async.worker.changes import WholeWatch
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.world import entered_world

_REMEDY = (
    'give a schedule as "scheduler" in the configuration, or as lr_scheduler=, which follows the run\'s progress, or '
    "set the rate by engine.progress"
)


class LocalEngine(AsyncEngine):
    """The engine of local SGD: steps as DeepSpeed does, and exchanges after its local steps.

    A step whose gradient has NaN or Inf is left out, since the optimizer would keep the NaN or Inf in its moments. Such
    a step changes no parameter, and counts as skipped and not as a local step, as those that fp16 skips.
    """

    async_worker: LocalSGDWorker
    lr_scheduler: Any  # of DeepSpeed
    _own = WholeWatch(())  # of the parameters that are trained
    _own_rates: OwnRates | None = None

    def set_up(
        self, async_worker: LocalSGDWorker | HybridWorker, spec: MethodSpec, context: WorkerContext, run_dir: Path
    ) -> None:
        """Sets the attributes of this class; see :meth:`AsyncEngine.set_up`.

        Raises:
            ConfigurationError: the learning-rate schedule cannot follow the run, or the optimizer cannot step what
                DeepSpeed gives it.
        """
        tensors.round_masters(tensors.replica_of(self, context.rank))
        super().set_up(async_worker, spec, context, run_dir)
        self._lacks_gradient = False
        tensors.check_matrices(self)
        self._unstepped = tensors.unstepped(self)
        check_overflow_always(self.optimizer)
        self._own = WholeWatch(each for _, each in self._trained)
        counts = self.workers > 1 and spec.total_steps and self.lr_scheduler is None and entered_world() is None
        self._own_rates = OwnRates(self.basic_optimizer, _REMEDY) if counts else None
        self._followed = FollowedSchedule(self.lr_scheduler, self.optimizer, spec.total_steps)

    @errors_in_one_line()
    def _backward_epilogue(self) -> None:
        """Ends a backward pass, whether ``engine.backward(loss)`` or ``loss.backward()`` has begun it.

        A gradient of a parameter that is in no exchange ends the process with one line.
        """
        super()._backward_epilogue()
        if not self.finished:
            tensors.check_unstepped(self._unstepped)

    @errors_in_one_line()
    def _check_masters(self) -> None:
        tensors.check_masters(tensors.replica_of(self, self.context.rank))

    def offload_states(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuses what would move the fp32 masters to other memory: the exchange would go on with the old one."""
        fail(
            'offload_states: with "async_training" the optimizer stays where it is; leave the call out, or give '
            '"offload_optimizer"'
        )

    @errors_in_one_line()
    def _check_followed(self) -> None:
        """Checks as :meth:`AsyncEngine._check_followed`, and that no schedule counts this worker's own steps."""
        super()._check_followed()
        if self._own_rates is not None:
            self._own_rates.check(self.async_worker.total_progress)

    @property
    def progress(self) -> float:
        """See :attr:`AsyncEngine.progress`; a loop may set its learning rate by it."""
        if self._own_rates is not None:
            self._own_rates.asked = True
        return super().progress

    def _set_learning_rates(self) -> None:
        """Sets the rates as :meth:`AsyncEngine._set_learning_rates`, or those of the shard's progress."""
        if self.async_worker.shard is None:
            super()._set_learning_rates()
        else:
            self._followed.follow(self.async_worker.progress)
        self._own.note()  # the end of each step, and of the join

    def pull(self) -> None:
        """Pulls as :meth:`AsyncEngine.pull`."""
        super().pull()
        self._own.note()

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> object:
        """Saves as :meth:`AsyncEngine.save_16bit_model`; parameters that a script has loaded for that are an error:
        they would be taken for a local step, and the server's saved."""
        if self.worker == 0 and not self.finished and self._own.changed():
            fail(
                "save_16bit_model() saves the server's parameters, and the script has loaded others into the model "
                "since the last step: save these by torch.save(engine.module.state_dict(), FILE), or after engine.end()"
            )
        return super().save_16bit_model(*args, **kwargs)

    def step(self, *args: object, **kwargs: object) -> None:
        """Steps as DeepSpeed does; after the last local step of a round, exchanges with the server.

        A worker whose gradients had NaN or Inf several times in a row ends with one line. With a loss scale,
        they count once it is 1; in fp16, DeepSpeed itself ends the worker when the scale cannot be lowered.
        """
        before = self.global_steps
        super().step(*args, **kwargs)
        if self.global_steps > before:  # not after each of several micro-batches
            if not (self.finished or self._lacks_gradient):
                self._end_step()
            self.loop.begin_step()

    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Steps the optimizer if the gradient is finite and the run is not over; else skips the step."""
        self._check_trained()
        self._check_followed()
        self._lacks_gradient = tensors.has_no_gradient(self)
        if self._is_past_the_end():
            self._skip_step()
        elif self._lacks_gradient:  # torch's optimizer would do nothing, which is no local step
            self._skip_without_gradient()
        elif tensors.has_nonfinite_step(self):
            lower_loss_scale(self)
            self._skip_step()
        else:
            self._takes_step = True
            schedule, self.lr_scheduler = self.lr_scheduler, None  # which follows the run, and not these steps
            super()._take_model_step(lr_kwargs)
            self.lr_scheduler, self._takes_step = schedule, False

    @errors_in_one_line()
    def _end_step(self) -> None:
        """Counts a step that was taken, and exchanges with the server if it was the last of its round."""
        seconds, skipped = self.loop.slowed_down(), not self.was_step_applied()
        if not may_overflow(self):
            self.loop.count_left_out(skipped)
        if not skipped and self.async_worker.step(seconds, self._loss):
            self._log()
        self._set_learning_rates()
