"""DeepSpeed's engine as a worker of an asynchronous run."""

import atexit
import logging
import shutil
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils.data import DistributedSampler

from fairseq_async.algorithms.rule import State
from fairseq_async.deepspeed_plugin.compat import (
    count_step,
    refresh_masters,
    refuse_other_steps,
)
from fairseq_async.deepspeed_plugin.engines import tensors
from fairseq_async.deepspeed_plugin.engines.checkpoints import (
    COMPRESSOR_STATE,
    SERVER_STATE,
    check_files,
    checkpoint_directory,
    own_checkpoint,
    server_state_beside,
)
from fairseq_async.deepspeed_plugin.schedules import FollowedSchedule
from fairseq_async.errors import AsyncError, ConfigurationError, RefusedError, fail, why_not_written
from fairseq_async.method.spec import MethodSpec
from fairseq_async.worker.changes import LoopWatch
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line

logger = logging.getLogger(__name__)

_BEGINS = "async_begins"  # in the client state of a checkpoint
_MOST_IN_A_ROW = 100  # steps without a gradient
_STATE_AT_END = ".state-at-end.pt"  # in run_dir
_NOT_JOINED = (
    "the model is trained before the run is joined, which engine(...) does, and engine.module(...) does not: call "
    "engine.join_run() before the first batch, where the script calls the module itself"
)
ClientState: TypeAlias = dict[str, Any]  # what a script saves in a checkpoint besides the engine


class AsyncEngine(DeepSpeedEngine):
    """A DeepSpeed engine that is one rank of a worker of an asynchronous run.

    ``deepspeed.initialize`` makes the engine; its class is changed to this one afterwards, and :meth:`set_up` stands
    for the constructor, which never runs. The engine joins the run when its first batch is drawn or computed, or at
    ``load_checkpoint``, whichever comes first, and exchanges with the server in ``step``.

    Attributes:
        async_worker: the worker side of the method.
        worker: the worker's number; worker 0 is to validate and save.
        workers: how many were started, of which each is to draw its own part of the data.
        context: which rank of which worker this process is.
    """

    async_worker: LocalSGDWorker | HybridWorker
    worker: int
    workers: int
    context: WorkerContext

    def set_up(
        self, async_worker: LocalSGDWorker | HybridWorker, spec: MethodSpec, context: WorkerContext, run_dir: Path
    ) -> None:
        """Sets the attributes of this class.

        Args:
            async_worker: the worker side of the method, which has not joined the run yet.
            spec: the method's description, with which the worker will join.
            context: which worker this is, with the number that the server has given to it.
            run_dir: where worker 0 keeps the server's state after :meth:`end`.
        """
        self.async_worker, self.spec, self.context, self.worker = async_worker, spec, context, context.worker
        self.workers = context.workers
        self._state_at_end, self._has_left = run_dir.resolve() / _STATE_AT_END, False
        self._loss: Tensor | None = None
        self.loop = WorkerLoop(async_worker, context)
        self._warned_of_end = False
        self._without_gradient = range(0)  # numbers of the last steps in a row without one
        self._trained = tensors.trainable(self)
        self._loop_watch = LoopWatch(partial(tensors.watched, self), [each for _, each in self._trained])
        self._followed = FollowedSchedule(self.lr_scheduler, self.served)
        self._takes_step = False  # whether the engine itself is in a step of its optimizer
        refuse_other_steps(self, self.workers, lambda engine: engine._takes_step or engine.finished)

    @property
    def served(self) -> Any:
        """The optimizer whose learning rates follow the run."""
        return self.optimizer

    @property
    def finished(self) -> bool:
        """Whether the run is over; then the model has the server's last parameters."""
        return self.async_worker.finished

    @property
    def progress(self) -> float:
        """How far the whole run is: mean local steps of a worker, or steps of the server."""
        return self.async_worker.total_progress

    def join_run(self) -> LocalSGDWorker | HybridWorker:
        """Joins the run if that has not happened yet; returns the worker side of the method."""
        if not self.async_worker.joined:
            self._check_loop()
            self._followed.begin()  # where the script has loaded it
            self._check_masters()
            self._join(None)
        return self.async_worker

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Computes as DeepSpeed does; the first call joins the run, even if it is a validation, which all may share."""
        self.join_run()
        if self.module.training and torch.is_grad_enabled() and not self.finished:  # eval() leaves self.training
            self.async_worker.batches.note((inputs, kwargs))
            if not self.loop.began:
                self.loop.begin_step()
            if self._loop_watch.count_pass():
                self._check_loop()
        return super().forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> object:
        """Computes gradients as DeepSpeed does, and keeps the loss for the server's log."""
        if not self.async_worker.joined:
            fail(_NOT_JOINED)
        self._loss = loss.detach().clone()  # with CUDA graphs the next step writes its loss into the same memory
        return super().backward(loss, *args, **kwargs)

    def step(self, lr_kwargs: object = None) -> None:
        """Steps as DeepSpeed does."""
        if lr_kwargs:
            fail("engine.step(lr_kwargs=…): the schedule follows the run's steps; leave lr_kwargs out")
        self._loop_watch.step()
        super().step()

    def _check_loop(self) -> None:
        """Ends the process with one line if the model is trained before the run, or without ``engine.step()``."""
        if not self.async_worker.joined:
            if self._loop_watch.trained_before():
                fail(_NOT_JOINED)
        elif not self.finished and (name := self._loop_watch.trained_without_step()):
            fail(
                f"{name} is trained without engine.step(), which alone the run sees: call it instead of another "
                "optimizer's step()"
            )

    def check_at_exit(self) -> None:
        """As :meth:`_check_loop`, if ``engine.step()`` was never called; after it, a model may be changed."""
        if not self._loop_watch.has_stepped:
            self._check_loop()

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a loader as DeepSpeed does, for training one of this rank's part among the ranks of all workers."""
        given = signature(super().deepspeed_io).bind(*args, **kwargs).arguments
        if given.get("data_sampler") is None and given.get("route", ROUTE_TRAIN) == ROUTE_TRAIN:
            given["data_sampler"] = DistributedSampler(given["dataset"], self.context.ranks, self.context.global_rank)
        return super().deepspeed_io(**given)

    @errors_in_one_line()
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: ClientState | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Saves this worker's engine, and from worker 0 also the server's whole state.

        Worker 0's checkpoint is in ``save_dir``, that of worker n in its subdirectory ``worker-n``. After :meth:`end`,
        the server's state is the one that it had then.
        """
        tag = f"global_step{self.global_steps}" if tag is None else tag
        self._check_loop()
        self.async_worker.settle()
        own = checkpoint_directory(save_dir, self.worker)
        position = {_BEGINS: self._followed.state_dict()}
        saved = super().save_checkpoint(own, tag, (client_state or {}) | position, *args, **kwargs)
        compressor = self.async_worker.compressor_state() if self.context.rank == 0 else None
        if compressor is not None:
            torch.save(compressor, Path(own) / str(tag) / COMPRESSOR_STATE)
        if self.worker == 0 and self.async_worker.joined:
            self._save_server_state(Path(save_dir).resolve() / str(tag) / SERVER_STATE)
        return saved

    def _save_server_state(self, path: Path) -> None:
        """Saves the server's state, or a copy of the one that :meth:`end` has kept.

        Raises:
            RefusedError: the file cannot be written.
        """
        if not self._has_left:
            self.async_worker.client.save_state(str(path))
        elif self.context.rank == 0:
            try:
                shutil.copy(self._state_at_end, path)
            except OSError as error:
                why = why_not_written(error, path.parent)
                raise RefusedError(f"the server's state cannot be written to {path}: {why}") from error

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", *args: object, **kwargs: object
    ) -> object:
        """Saves the model as DeepSpeed does: from worker 0 with the server's parameters, from worker n its own, in the
        subdirectory ``worker-n``. ``save_fp16_model`` calls this, too."""
        if self.worker == 0 and self.async_worker.joined:
            self.pull()
        else:
            self.async_worker.settle()
        return super().save_16bit_model(checkpoint_directory(save_dir, self.worker), save_filename, *args, **kwargs)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, ClientState]:
        """Loads this worker's checkpoint and joins the run; worker 0 also brings the server its state back.

        A worker without a checkpoint of its own starts with worker 0's inner optimizer. Where the checkpoint has no
        server state, or with ``load_module_only``, a new run starts from worker 0's parameters. After :meth:`end`, it
        only loads as DeepSpeed does, for instance the best checkpoint at the end of a run.
        """
        if self.async_worker.joined and not self.finished:
            fail("load_checkpoint must come before the first batch of an asynchronous run, or after engine.end()")
        own, began = own_checkpoint(load_dir, tag, self.worker), self._followed.state_dict()
        check_files(self, own, tag, load_optimizer_states and not load_module_only)
        loaded: tuple[str | None, ClientState] = super().load_checkpoint(
            own,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        if not load_optimizer_states:
            refresh_masters(self)
        begins = (loaded[1] or {}).pop(_BEGINS, None)
        if self.finished:
            return loaded
        state = None if load_module_only or loaded[0] is None else server_state_beside(loaded[0], load_dir, begins)
        if state is None:
            if self.worker == 0 and not load_module_only:
                logger.warning("no server state in %s: a new run begins from its parameters", load_dir)
            self._followed.begin()
            self._join(None)
            return loaded
        if not load_optimizer_states:
            self._check_without_optimizer()
        self._followed.load_state_dict(begins if load_lr_scheduler_states and begins else began)
        self._join(state)
        self._restore_compressor(loaded[0])
        return loaded

    def _check_without_optimizer(self) -> None:
        """Checks that this worker can go on with a server's state and without a checkpoint's optimizer; here its inner
        one begins anew."""

    def _restore_compressor(self, loaded_from: str | None) -> None:
        """Restores what compressed updates left unsent, unless the checkpoint is of another time than the server."""
        path = None if loaded_from is None else Path(loaded_from).resolve().parent / COMPRESSOR_STATE
        if path is not None and path.exists():
            self.async_worker.restore_compressor(torch.load(path, weights_only=True))

    @errors_in_one_line()
    def end(self, for_all: bool = False) -> None:
        """Ends this worker's part in the run: waits until no other worker is at work; the model then has the finished
        parameters.

        Local steps that are done are sent first, and worker 0 keeps the server's state for a last checkpoint. A loop
        that ends by its own count calls this afterwards: otherwise the steps since the last exchange are lost, and
        what it saves lacks what others send later. Steps after this call are no part of the run.

        Args:
            for_all: whether to end the run for all workers, which stop after their present step or round; the model
                has the server's present parameters.
        """
        self._check_loop()
        if not self.async_worker.joined or self.finished:
            return
        if for_all:
            self.pull()
        else:
            self.async_worker.await_end()
        if self.worker == 0:
            self._keep_server_state()
        self.async_worker.client.leave(finished=for_all)
        self.async_worker.finished = self._has_left = True

    def _keep_server_state(self) -> None:
        """Keeps the server's state in a file until this process ends; where that fails, warns and goes on."""
        path = self._state_at_end
        if self.context.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)  # the server's run_dir may be another one
            path.unlink(missing_ok=True)  # of a process that was killed
            atexit.register(path.unlink, missing_ok=True)
        try:
            self.async_worker.client.save_state(str(path))
        except AsyncError as error:
            logger.warning("the server's state is not kept, and save_checkpoint() will fail after this: %s", error)

    @errors_in_one_line()
    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation.

        With local SGD, local steps that are done are sent first; the rest of the round is given up.
        """
        self._check_loop()
        self._loop_watch.begin_again()
        self.join_run().catch_up()

    def _check_masters(self) -> None:
        """Checks that fp32 masters have the parameters that the script has given the model; here there are none."""

    @errors_in_one_line()
    def _join(self, server_state: Path | None) -> None:
        self._loop_watch.join()
        self.loop.join(self.spec, lambda: server_state or self._state_brought(), self._state_at_end.parent)
        self._set_learning_rates()

    def _state_brought(self) -> State | None:
        """Returns the state that a new server goes on from, where no checkpoint has one; here none."""
        return None

    def _set_learning_rates(self) -> None:
        """Sets the optimizer's learning rates to those of the run's progress, which never goes back: a ``Trainer``
        counts its steps by it, upwards only."""
        self._followed.follow(self.async_worker.run_progress)

    @errors_in_one_line()
    def _check_followed(self) -> None:
        """Checks that the script neither steps nor replaces the schedule, before it is set to the run's progress
        again."""
        self._followed.check()
        if self.lr_scheduler is not self._followed.schedule:
            raise ConfigurationError(
                "the script has given the engine another lr_scheduler, which the run does not follow: give it to "
                "initialize, as lr_scheduler="
            )

    def _is_past_the_end(self) -> bool:
        """Whether the run was over before this step, which then does nothing but count; says so once."""
        if self.finished and not self._warned_of_end:
            logger.warning(
                "the run is over, and engine.step() does nothing any more: the model has the server's last parameters; "
                "let the loop end when engine.finished is True"
            )
            self._warned_of_end = True
        return self.finished

    def _check_trained(self) -> None:
        """Ends the process with one line if other parameters are trained than are exchanged: each worker would train
        its own."""
        trained = tensors.trainable(self)
        now, before = ({(name, id(each)) for name, each in named} for named in (trained, self._trained))
        if others := now ^ before:
            fail(f"{min(others)[0]} was frozen, unfrozen or made anew during the run: begin with what is to be trained")

    def _skip_step(self) -> None:
        """Clears the gradients and counts the step as skipped, as DeepSpeed counts steps that its fp16 leaves out."""
        self.optimizer.zero_grad()
        self.zero_grad()
        self.skipped_steps += 1
        count_step(self, applied=False)

    def _skip_without_gradient(self) -> None:
        """Skips a step for which the script has not called ``backward``; says so at the first one, and ends the process
        after many in a row: they do not bring the end of the run nearer."""
        if not self._without_gradient:
            logger.warning(
                "engine.step() without a gradient does nothing: call engine.backward(loss) before it in each step"
            )
        number, before = self.global_steps, self._without_gradient
        self._without_gradient = range(before.start if number == before.stop else number, number + 1)
        if len(self._without_gradient) == _MOST_IN_A_ROW:
            fail(f"{_MOST_IN_A_ROW} calls of engine.step() in a row had no gradient: call engine.backward(loss) before")
        self._skip_step()

    def _log(self) -> None:
        """Writes figures of the last exchange to DeepSpeed's monitor, over samples as its other curves."""
        if self.monitor.enabled:
            scalars = [(f"Async/{name}", value, self.global_samples) for name, value in self.async_worker.last.items()]
            self.monitor.write_events(scalars)
