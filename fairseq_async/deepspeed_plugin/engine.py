"""DeepSpeed's engine as a worker of an asynchronous run."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.errors import AsyncError, ConfigurationError, fail
from fairseq_async.worker.gradients import GradientWorker
from fairseq_async.worker.local_sgd import LocalSGD
from fairseq_async.worker.place import Place

logger = logging.getLogger(__name__)

_STATE = "async_server.pt"


class AsyncEngine(DeepSpeedEngine):
    """An engine that was made by ``deepspeed.initialize`` and then entered a run.

    It joins when its first batch is drawn or computed, or at ``load_checkpoint``, whichever comes first, and exchanges
    in ``step``. ``pull()`` takes the server's current parameters into the model, for validation.

    Attributes:
        local: this worker's half of the method.
        worker: its number; worker 0 is to validate and save.
    """

    local: LocalSGD | GradientWorker
    worker: int

    def enter(self, local: LocalSGD | GradientWorker, method: dict[str, Any], place: Place) -> None:
        """Becomes a worker."""
        self.local, self.method, self.place, self.worker = local, method, place, place.worker
        self._loss: torch.Tensor | None = None
        self._step_ended = 0.0
        check_scheduler(self.lr_scheduler)

    @property
    def finished(self) -> bool:
        """The run is over; the model has the server's last parameters."""
        return self.local.finished

    @property
    def progress(self) -> float:
        """Of the run so far: mean local steps of a worker, or applied updates."""
        return self.local.total_progress

    def join_run(self) -> LocalSGD | GradientWorker:
        """Enters the run, if that has not happened yet."""
        if not self.local.joined:
            self._join(None)
        return self.local

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.join_run()
        self._step_ended = self._step_ended or time.perf_counter()
        return super().forward(*inputs, **kwargs)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._loss = loss.detach()
        return super().backward(loss, *args, **kwargs)

    def save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, of this worker (workers but 0 in a directory of their own); and from worker 0 the server's whole
        state beside it."""
        tag = f"global_step{self.global_steps}" if tag is None else tag
        self._calling(self.local.settle)
        saved = super().save_checkpoint(self._own(save_dir), tag, *args, **kwargs)
        if self.worker == 0 and self.local.joined:
            path = Path(save_dir).resolve() / str(tag) / _STATE
            self._calling(self.local.client.ask, {"kind": "snapshot", "path": str(path)})
        return saved

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, and joins the run: with worker 0 the server's state comes back, where the checkpoint has one.

        A worker without a checkpoint of its own begins with a new inner optimizer.
        """
        if self.local.joined:
            self._calling(_refuse, "load_checkpoint must come before the first batch of an asynchronous run")
        own = Path(self._own(load_dir))
        if self.worker > 0 and not own.is_dir():
            logger.warning("worker %d: no checkpoint in %s, its inner optimizer begins anew", self.worker, own)
            self._join(None)
            return None, {}
        loaded = super().load_checkpoint(str(own), tag, *args, **kwargs)
        state = Path(loaded[0]).resolve().parent / _STATE if loaded[0] is not None else None
        if state is None or not state.exists():
            state = None
            if self.worker == 0:
                logger.warning("no server state in %s: a new run begins from its parameters", load_dir)
        self._join(state)
        return loaded

    def _own(self, directory: str) -> str:
        return directory if self.worker == 0 else str(Path(directory) / f"worker-{self.worker}")

    def _join(self, state: Path | None) -> None:
        self._calling(self._enter_run, state)
        follow(self.lr_scheduler, self.local.progress)

    def _enter_run(self, state: Path | None) -> None:
        welcome = self.local.join(self.method)
        if not welcome["initialised"]:
            welcome = self.local.bring_parameters(None if state is None else str(state))
        self.local.begin(welcome)

    def _calling(self, call: Any, *arguments: Any) -> Any:
        """A mistake of the user's ends the process with one line, not with a traceback."""
        try:
            return call(*arguments)
        except AsyncError as error:
            fail(error)

    def _log(self) -> None:
        """To DeepSpeed's own monitor, by samples as its other curves."""
        if self.monitor.enabled:
            scalars = [(f"Async/{name}", value, self.global_samples) for name, value in self.local.last.items()]
            self.monitor.write_events(scalars)


class LocalEngine(AsyncEngine):
    """Steps as DeepSpeed does, and exchanges after its local steps."""

    local: LocalSGD

    def step(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's step; after the last one of a round, the exchange."""
        before = self.global_steps
        super().step(*args, **kwargs)
        if self.global_steps == before:  # more micro-batches are to come
            return
        time.sleep((self.place.slowdown - 1.0) * (time.perf_counter() - self._step_ended))
        seconds = time.perf_counter() - self._step_ended
        if self._calling(self.local.step, seconds, self._loss):
            self._log()
        follow(self.lr_scheduler, self.local.progress)
        self._step_ended = time.perf_counter()

    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation.

        Local steps that are done are sent first; the rest of the round is given up.
        """
        self._calling(self.local.settle)
        if self.finished:
            return
        if self.local.done:
            self._calling(self.local.exchange)
        else:
            self._calling(self.local.pull)


class HybridEngine(AsyncEngine):
    """Pushes its gradients where DeepSpeed would step: the optimizer steps in the server."""

    local: GradientWorker

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """In place of DeepSpeed's, at the end of the micro-batches."""
        time.sleep((self.place.slowdown - 1.0) * (time.perf_counter() - self._step_ended))
        loss = None if self._loss is None else float(self._loss)
        self._calling(self.local.step, self.train_batch_size(), loss)
        for group in self.optimizer.param_groups:
            group["lr"] = self.local.learning_rate
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_ended = time.perf_counter()
        self._log()

    def pull(self) -> None:
        """Takes the server's current parameters into the model, for validation."""
        self._calling(self.local.pull)


def _refuse(message: str) -> None:
    raise ConfigurationError(message)


def check_scheduler(scheduler: Any) -> None:
    """Only a schedule that is a function of a count can follow the run.

    Raises:
        ConfigurationError: it is another.
    """
    if scheduler is None or hasattr(scheduler, "last_batch_iteration"):
        return
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        name = type(scheduler).__name__
        raise ConfigurationError(f"{name} cannot follow the run's progress; use one of DeepSpeed's, or LambdaLR")


def follow(scheduler: Any, progress: float) -> None:
    """Sets the schedule to where the run is: after n steps of a synchronous run its count is n − 1."""
    if hasattr(scheduler, "last_batch_iteration"):
        if progress >= 1:
            scheduler.step(int(progress) - 1)
    elif scheduler is not None:
        scheduler.last_epoch = int(progress) - 1
        scheduler.step()
