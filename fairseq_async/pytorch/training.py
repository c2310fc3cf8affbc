"""The base of the context managers: joining and leaving a run, the server's parameters, checkpoints."""

import atexit
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fairseq_async.algorithms.rule import State
from fairseq_async.environment import WORKER
from fairseq_async.errors import USER_ERROR, ConfigurationError, fail, has_failed
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options.config import ServerOptions
from fairseq_async.pytorch.closure import ComputedLoss, closure_of
from fairseq_async.pytorch.islands import check_alone, check_model, refuse_within_ranks, unwrapped
from fairseq_async.pytorch.parameters import (
    check_exchanged,
    check_optimizers,
    drop_gradients,
    exchanged_parameters,
    note_untrained,
    one_model,
)
from fairseq_async.pytorch.steps import allow_steps, refuse_early, refuse_step, watch_steps
from fairseq_async.server.optimizers.own_class import has_two_sets
from fairseq_async.worker.async_worker import AsyncWorker
from fairseq_async.worker.batches import note_calls
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.loop import WorkerLoop
from fairseq_async.worker.server_state import fetch_state
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import ServerProcess
from fairseq_async.worker.start.world import connect_rank, entered_world

_ONE_RUN = ("RANK", WORKER)  # set by launchers, which tell a process of one server
_Self = TypeVar("_Self", bound="AsyncTraining")
_Made = TypeVar("_Made")


class AsyncTraining(ABC):
    """One worker of an asynchronous run, round an ordinary optimizer; the base of the methods' context managers.

    In the ``with`` block, ``optimizer.step()`` takes part in the run, and nothing else of the loop changes. Entering
    the block connects to the server, which worker 0 starts where no launcher has done so, and takes its parameters: in
    a new run those of worker 0's model. At the end of the block the model has the server's parameters. If an exception
    ends the block, the worker is gone from the run as if it had been killed.

    A step whose gradient has NaN or Inf is left out. Mistakes end the process with one line and exit code 2. So do
    steps that the run does not see, such as those of an optimizer that was made anew in the block.

    Attributes:
        worker: this worker's number; worker 0 is to evaluate and save.
        workers: number of workers that were announced, for a ``DistributedSampler``.
        loss: loss of the coming step, for the log; set it before ``optimizer.step()`` if you like.
        of_trainer: whether a ``Trainer`` has the loop: worker 0 alone says how many steps the run has, schedules follow
            the run, and checkpoints have the server's state; to be set before the block is entered.
        by_script: whether it is an error that two workers begin with the same batches; likewise.
        total_steps: number of steps of the run, once the block is entered; 0 for no end.
        types: those that the parameters may have.
    """

    server_module: str
    types: tuple[torch.dtype, ...] = (torch.float32,)

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer], server: ServerOptions
    ) -> None:
        self.optimizers: list[Optimizer] = listed(optimizer)
        self._context = entered_world() or WorkerContext.find()
        given = one_model(listed(model))
        check_model(given, self._context.island_size, entered_world() is not None)
        self._model = unwrapped(given)
        check_optimizers(self.optimizers, self._context.island_size)
        self._server_options, self._run_dir = server, Path(server.run_dir)
        self._named = exchanged_parameters(self._model, self.optimizers, self.types, self._context.island_size)
        self._exchanged = {id(parameter) for _, parameter in self._named}
        self.loss: float | Tensor | None = None
        self.of_trainer, self.by_script, self.total_steps = False, False, 0
        self._restored: State | None = None
        self._server: ServerProcess | None = None
        self._client: ServerConnection | None = None
        self._has_left = False
        self._handles: list[RemovableHandle] = []
        self._made_loop: WorkerLoop | None = None
        self._warned = False
        for each in self.optimizers:
            each.register_step_pre_hook(refuse_early)

    @property
    def worker(self) -> int:
        return self._context.worker

    @property
    def workers(self) -> int:
        return self._context.workers

    @property
    def rank(self) -> int:
        """This process's number among the ranks of all workers, for a ``DistributedSampler``; see :attr:`ranks`."""
        return self._context.global_rank

    @property
    def ranks(self) -> int:
        """Number of the ranks of all workers that were announced."""
        return self._context.ranks

    @property
    @abstractmethod
    def async_worker(self) -> AsyncWorker:
        """The worker side of the method; it is made when the block is entered."""

    @property
    def finished(self) -> bool:
        """Whether the run has had its ``total_steps``; then the model has the server's last parameters."""
        return self.async_worker.finished

    @property
    @abstractmethod
    def progress(self) -> float:
        """How far the whole run is, in the steps that ``total_steps`` counts."""

    @errors_in_one_line()
    def pull(self) -> None:
        """Takes the server's current parameters into the model.

        With local SGD, local steps that are done are sent first; the rest of the round is given up.
        """
        self.restore_parameters()
        self.async_worker.catch_up()

    @abstractmethod
    def describe(self, workers: int) -> MethodSpec:
        """Returns the method's description for a run with this many workers."""

    @abstractmethod
    def _make_worker(self, client: ServerConnection) -> AsyncWorker: ...

    def _state_brought(self, spec: MethodSpec) -> State | None:
        """Returns the state that the optimizers bring to a new server; None where they have none, or keep it."""
        return None

    @abstractmethod
    def _add_hooks(self) -> list[RemovableHandle]: ...

    @abstractmethod
    def _prepare_step(self, optimizer: Optimizer) -> None: ...

    # The block

    @errors_in_one_line()
    def __enter__(self: _Self) -> _Self:
        allow_steps(self.optimizers)
        try:
            self._join()
        except BaseException:
            self.abandon()
            raise
        self._handles = [*self._add_hooks(), *watch_steps(self.optimizers, self._named, self.workers, self.of_trainer)]
        self._handles += note_calls(self._model, self.async_worker.batches)
        if self._context.island_size == 1 and entered_world() is None:
            self._handles += refuse_within_ranks(self._model)
        self.loop.begin_step()
        atexit.register(self._end_with_process, os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:
            return  # the process may end here without an error, and the run would not: see _end_with_process
        if not isinstance(error, GeneratorExit | None):
            return self.abandon()
        try:
            self.leave()
        finally:
            self.abandon()

    def _end_with_process(self, process: int) -> None:
        """Ends the process with one line and exit code 2 where the script has ended well and has not left the run.

        Args:
            process: the one that has entered the run, and not one that was forked from it.
        """
        if self._client is None or process != os.getpid():
            return
        try:
            if self._has_left or self.of_trainer or has_failed():
                return
            if not self.finished:
                fail(
                    f"the script has ended within the block of {type(self).__name__}, whose end it has not reached: "
                    "what others send later is not in this worker's model, nor are its last local steps in the run; "
                    "let the with block end, or call worker.leave(), before the model is saved"
                )
            self.leave()
        except SystemExit:  # whose code Python does not take from here
            self.abandon()
            sys.stdout.flush()
            os._exit(USER_ERROR)
        finally:
            self.abandon()

    def _join(self) -> None:
        _note_run()
        if entered_world() is None:
            check_alone(self._context)
        if not self._context.joins:  # a mistake is to show before anything starts
            self.describe(self.workers)
        device = self._named[0][1].device
        self._context, self._client, self._server = connect_rank(
            self._context, self.server_module, self._server_options, self._run_dir, device
        )
        worker = self._make_worker(self._client)
        note_untrained(worker, self._model, self._exchanged, restored=self._restored is not None)
        worker.details.any_length, worker.details.by_script = self.of_trainer, self.by_script
        self._made_loop, spec = WorkerLoop(worker, self._context), self.describe(self.workers)
        brings = self._context.rank == 0
        welcome = self.loop.join(
            spec, lambda: (self._restored or self._state_brought(spec)) if brings else None, self._run_dir
        )
        self._restored, self.total_steps = None, welcome.total_steps

    @errors_in_one_line()
    def leave(self, for_all: bool = False) -> None:
        """Ends this worker's part: waits until no other worker is at work; the model has the finished parameters then.

        Args:
            for_all: whether to end the run for all workers, which stop after their present step or round. The model
                keeps the parameters that it has.
        """
        self._remove_hooks()
        if self._client is not None and not self._has_left:
            self._has_left = True
            if not for_all:
                self.restore_parameters()
                self.async_worker.await_end()
            self._client.leave(finished=for_all)
        self._handles = [each.register_step_pre_hook(refuse_step) for each in self.optimizers]
        if self._server is not None:
            self._server.outlast_workers()
            self._server = None  # it ends with this process, which may die before it has saved the model

    def abandon(self) -> None:
        """Leaves the run as if the worker had been killed; also ends a server that this worker has started.

        The server then writes a last snapshot, unless the run is over.
        """
        self._remove_hooks()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.end()
        self._client = self._server = None
        atexit.unregister(self._end_with_process)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # The server's parameters and state

    @contextmanager
    def server_parameters(self) -> Iterator[None]:
        """Within it, the model has the server's parameters, for worker 0 to evaluate and save; afterwards its own.

        What the script changes within it stays changed with local SGD, also where an exception ends it; hybrid ends the
        process with one line, after an exception at the next step.
        """
        self.take_server_parameters()
        try:
            yield
        except BaseException:
            self.loop.give_back(self.loop.changed())  # the script's own error is the one to be seen
            raise
        self.restore_parameters()

    @errors_in_one_line()
    def take_server_parameters(self) -> None:
        """Gives the model the server's parameters, until :meth:`restore_parameters`; only worker 0 is given them."""
        self.loop.take_server_parameters(partial(fetch_state, self._connected, self._run_dir))

    @errors_in_one_line()
    def restore_parameters(self) -> None:
        """Gives the model its own parameters again, if it has the server's, but for values that were changed since."""
        two_sets: list[Any] = [] if self.loop.state is None else [*filter(has_two_sets, self.optimizers)]
        for optimizer in two_sets:
            optimizer.train()  # the Trainer calls it when the next step begins, which would move the worker's own
        if changed := self.loop.changed():
            self.async_worker.check_unchanged(changed)
        self.loop.give_back(changed)

    @errors_in_one_line()
    def state_dict(self) -> State:
        """Returns the server's whole state, for worker 0's checkpoint; an empty dictionary on every other worker.

        Within :meth:`server_parameters` it is the state whose parameters the model has.
        """
        if self.worker > 0:
            return {}
        return self.loop.state or fetch_state(self._connected, self._run_dir)

    @errors_in_one_line()
    def load_state_dict(self, state: State) -> None:
        """Makes a new run go on from what :meth:`state_dict` has returned; call it before the block is entered.

        Worker 0 brings the state to the server, from which every worker takes its parameters.
        """
        if self._client is not None:
            raise ConfigurationError("load_state_dict comes before the with block: the run has begun")
        if state and not (isinstance(state, dict) and {"server", "method"} <= set(state)):
            raise ConfigurationError("load_state_dict: this is no server's state: give what state_dict() has returned")
        self._restored = state or None

    @property
    def loop(self) -> WorkerLoop:
        """What surrounds the worker's steps."""
        return self._inside(self._made_loop)

    @property
    def _connected(self) -> ServerConnection:
        return self._inside(self._client)

    @errors_in_one_line()
    def _inside(self, made: _Made | None) -> _Made:
        """Returns what exists in the block alone; raises a ConfigurationError outside of it."""
        if made is None:
            raise ConfigurationError(f"{type(self).__name__} is used outside of its with block")
        return made

    # Steps

    @errors_in_one_line()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks and prepares a step; returns other arguments for one with a closure, which is called here."""
        closure = closure_of(args, kwargs)
        computed = None if closure is None else ComputedLoss(closure, [each for _, each in self._named])
        if computed is not None and self.loss is None:
            self.loss = computed.loss
        several = "give its optimizer too (several in a list)"
        remedy = "give the Trainer an optimizer that has it" if self.of_trainer else several
        check_exchanged(self._model, self._exchanged, remedy, self.optimizers)
        self._prepare_step(optimizer)
        return None if computed is None else computed.in_place(args, kwargs)

    def _take_loss(self) -> float | Tensor | None:
        """Returns the loss of this step, without the graph behind it, and forgets it."""
        loss, self.loss = self.loss, None
        return loss.detach().clone() if isinstance(loss, Tensor) else loss  # CUDA graphs reuse a loss's memory

    def _leave_out_after_end(self) -> None:
        """Makes a step after the end of the run change nothing; says so at the first one."""
        drop_gradients(self._named)
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                "fairseq-async: the run has finished: steps change nothing any more; see worker.finished\n"
            )


def listed(given: Any) -> list[Any]:
    """Returns a list or tuple as a list, and anything else as the only element of one."""
    return list(given) if isinstance(given, list | tuple) else [given]


def _note_run() -> None:
    """Notes that this process takes part in a run.

    Raises:
        ConfigurationError: a launcher has started this process, and the process has taken part in a run before.
    """
    if _runs and any(name in os.environ for name in _ONE_RUN):
        raise ConfigurationError(
            "a process that a launcher has started takes part in one run: put the second one into a script of its own"
        )
    _runs.append(True)


_runs: list[bool] = []
