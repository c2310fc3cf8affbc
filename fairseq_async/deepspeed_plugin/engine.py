"""DeepSpeed's engine as a worker of an asynchronous run."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, runtime_checkable

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fairseq_async.deepspeed_plugin.batches import digest_of
from fairseq_async.errors import AsyncError, ConfigurationError, fail
from fairseq_async.method_spec import MethodSpec
from fairseq_async.worker.context import WorkerContext
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker

logger = logging.getLogger(__name__)

_SERVER_STATE = "async_server.pt"  # in the directory of a checkpoint
ClientState: TypeAlias = dict[str, Any]  # what a script saves in a checkpoint besides the engine
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@runtime_checkable
class DeepSpeedSchedule(Protocol):
    """A learning-rate schedule of DeepSpeed's: ``step(n)`` sets the rate of step n + 1."""

    last_batch_iteration: int

    def step(self, last_batch_iteration: int | None = None, /) -> None: ...


Schedule: TypeAlias = DeepSpeedSchedule | LRScheduler


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

    def set_up(self, async_worker: LocalSGDWorker | HybridWorker, spec: MethodSpec, context: WorkerContext) -> None:
        """Sets the attributes of this class.

        Args:
            async_worker: not joined yet.
            spec: the method, with which it will join.
            context: with the number that the server has given to the worker.

        Raises:
            ConfigurationError: the learning-rate schedule cannot follow the run.
        """
        self.async_worker, self.spec, self.context, self.worker = async_worker, spec, context, context.worker
        self.workers = context.workers
        self._loss: Tensor | None = None
        self._step_ended = 0.0
        check_schedule(self.lr_scheduler)

    @property
    def finished(self) -> bool:
        """Whether the run is over; then the model has the server's last parameters."""
        return self.async_worker.finished

    @property
    def progress(self) -> float:
        """How far the whole run is: mean local steps of a worker, or applied updates."""
        return self.async_worker.total_progress

    def join_run(self) -> LocalSGDWorker | HybridWorker:
        """Joins the run if that has not happened yet; returns the worker side of the method."""
        if not self.async_worker.joined:
            self._join(None)
        return self.async_worker

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Computes as DeepSpeed does; the first call joins the run."""
        self.join_run()
        if not self._step_ended:
            self.async_worker.first_batch = digest_of((inputs, kwargs))
            self._step_ended = time.perf_counter()
        return super().forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> object:
        """Computes gradients as DeepSpeed does, and keeps the loss for the server's log."""
        self._loss = loss.detach()
        return super().backward(loss, *args, **kwargs)

    def save_checkpoint(self, save_dir: str, tag: str | None = None, *args: object, **kwargs: object) -> object:
        """Saves this worker's engine, and from worker 0 also the server's whole state.

        Worker 0's checkpoint is in ``save_dir``, that of worker n in its subdirectory ``worker-n``.
        """
        tag = f"global_step{self.global_steps}" if tag is None else tag
        run_or_exit(self.async_worker.settle)
        saved = super().save_checkpoint(checkpoint_directory(save_dir, self.worker), tag, *args, **kwargs)
        if self.worker == 0 and self.async_worker.joined:
            path = Path(save_dir).resolve() / str(tag) / _SERVER_STATE
            run_or_exit(self.async_worker.client.save_state, str(path))
        return saved

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *args: object, **kwargs: object
    ) -> tuple[str | None, ClientState]:
        """Loads this worker's checkpoint and joins the run; worker 0 also brings the server its state back.

        A worker without a checkpoint of its own starts with worker 0's inner optimizer. Where the checkpoint has no
        server state, a new run starts from worker 0's parameters. After :meth:`end`, it loads as DeepSpeed does: the
        best checkpoint at the end of a run.
        """
        if self.async_worker.joined and not self.finished:
            fail("load_checkpoint must come before the first batch of an asynchronous run, or after engine.end()")
        own = Path(checkpoint_directory(load_dir, self.worker))
        if self.worker > 0 and not own.is_dir():
            logger.warning("worker %d: no checkpoint in %s, it takes worker 0's", self.worker, own)
            own = Path(load_dir)
        if self.finished:
            return super().load_checkpoint(str(own), tag, *args, **kwargs)
        loaded: tuple[str | None, ClientState] = super().load_checkpoint(str(own), tag, *args, **kwargs)
        state = Path(loaded[0]).resolve().parent / _SERVER_STATE if loaded[0] is not None else None
        if state is None or not state.exists():
            state = None
            if self.worker == 0:
                logger.warning("no server state in %s: a new run begins from its parameters", load_dir)
        self._join(state)
        return loaded

    def end(self, for_all: bool = False) -> None:
        """Ends this worker's part in the run, with the server's parameters in the model.

        Local steps that are done are sent first. A loop that ends by its own count calls this, or :meth:`pull`, after
        it: without, the steps since the last exchange are lost. Steps after it would be no part of the run.

        Args:
            for_all: end the run for all workers, which stop after their present step or round.
        """
        if not self.async_worker.joined or self.finished:
            return
        self.pull()
        self.async_worker.client.leave(finished=for_all)
        self.async_worker.finished = True

    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation."""
        raise NotImplementedError

    def _join(self, server_state: Path | None) -> None:
        run_or_exit(self._exchange_first_parameters, server_state)
        set_schedule(self.lr_scheduler, self.async_worker.progress)

    def _exchange_first_parameters(self, server_state: Path | None) -> None:
        """Joins; gives a server that has none the parameters, then takes the server's."""
        welcome = self.async_worker.join(self.spec)
        if not welcome.initialised:
            welcome = self.async_worker.bring_parameters(None if server_state is None else str(server_state))
        self.async_worker.begin(welcome)

    def _sleep_if_slowed_down(self) -> None:
        """Makes this step as many times longer as an experiment wants it."""
        time.sleep((self.context.slowdown - 1.0) * (time.perf_counter() - self._step_ended))

    def _log(self) -> None:
        """Writes figures of the last exchange to DeepSpeed's monitor, by samples as its other curves."""
        if self.monitor.enabled:
            scalars = [(f"Async/{name}", value, self.global_samples) for name, value in self.async_worker.last.items()]
            self.monitor.write_events(scalars)


class LocalEngine(AsyncEngine):
    """The engine of local SGD: steps as DeepSpeed does, and exchanges after its local steps."""

    async_worker: LocalSGDWorker

    def step(self, *args: object, **kwargs: object) -> None:
        """Steps as DeepSpeed does; after the last local step of a round, exchanges with the server."""
        before = self.global_steps
        super().step(*args, **kwargs)
        if self.global_steps == before:  # more micro-batches are to come
            return
        self._sleep_if_slowed_down()
        seconds = time.perf_counter() - self._step_ended
        if run_or_exit(self.async_worker.step, seconds, self._loss):
            self._log()
        set_schedule(self.lr_scheduler, self.async_worker.progress)
        self._step_ended = time.perf_counter()

    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation.

        Local steps that are done are sent first; the rest of the round is given up.
        """
        run_or_exit(self.async_worker.settle)
        if self.finished:
            return
        if self.async_worker.done:
            run_or_exit(self.async_worker.exchange)
        else:
            run_or_exit(self.async_worker.pull)


class HybridEngine(AsyncEngine):
    """The engine of hybrid asynchronous SGD: pushes gradients to the server, whose optimizer steps."""

    async_worker: HybridWorker

    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Exchanges with the server where DeepSpeed would step its optimizer, after the last micro-batch."""
        self._sleep_if_slowed_down()
        loss = None if self._loss is None else float(self._loss)
        run_or_exit(self.async_worker.step, self.train_batch_size(), loss)
        for group in self.optimizer.param_groups:
            group["lr"] = self.async_worker.learning_rate
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_ended = time.perf_counter()
        self._log()

    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation."""
        if not self.finished:
            run_or_exit(self.async_worker.pull)


def run_or_exit(call: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
    """Calls; an error that the user can act on ends the process with one line instead of a traceback."""
    try:
        return call(*args, **kwargs)
    except AsyncError as error:
        fail(error)


def checkpoint_directory(directory: str, worker: int) -> str:
    """Where worker or rank ``worker`` saves: ``directory`` itself for 0, a subdirectory for each other."""
    return directory if worker == 0 else str(Path(directory) / f"worker-{worker}")


def check_schedule(schedule: Schedule | None) -> None:
    """Checks that a schedule is a function of a count, which alone can follow the run.

    Raises:
        ConfigurationError: it is another.
    """
    if schedule is not None and not isinstance(schedule, DeepSpeedSchedule | LambdaLR):
        name = type(schedule).__name__
        raise ConfigurationError(f"{name} cannot follow the run's progress; use one of DeepSpeed's, or LambdaLR")


def set_schedule(schedule: Schedule | None, progress: float) -> None:
    """Sets a schedule to where the run is: after n steps of a synchronous run its count is n − 1."""
    if isinstance(schedule, DeepSpeedSchedule):
        if progress >= 1:
            schedule.step(int(progress) - 1)
    elif schedule is not None:
        schedule.last_epoch = int(progress) - 1
        schedule.step()
