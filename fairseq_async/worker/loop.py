"""What surrounds a worker's steps in every front end: its join, the time of a step, and the server's parameters."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Welcome
from fairseq_async.worker.async_worker import MOST_LEFT_OUT, AsyncWorker, Refusals
from fairseq_async.worker.changes import ParameterWatch
from fairseq_async.worker.server_state import state_file
from fairseq_async.worker.start.context import WorkerContext

_ROUNDING = 1e-5  # of a value, or of the mean value, is less than a script changes on purpose


class WorkerLoop:
    """One worker's training loop, whichever framework runs it.

    Args:
        worker: the worker side of the method.
        context: which worker this is, and how much slower it is made.

    Attributes:
        began: when the present step began, by ``time.perf_counter``; 0 before the first one.
        state: the server's state whose parameters the model has; None while the model has the worker's own.
    """

    def __init__(self, worker: AsyncWorker, context: WorkerContext) -> None:
        self.worker, self._slowdown, self._brings = worker, context.slowdown, context.rank == 0
        worker.share = context.share
        self.began = 0.0
        self._left_out = Refusals(context.worker, MOST_LEFT_OUT, "local step", "left out")
        self.state: State | None = None
        self._own: Tensor | None = None  # this worker's parameters, while the model has the server's
        self._watch = ParameterWatch([])  # of the server's ones in the model

    def join(self, spec: MethodSpec, brought: Callable[[], State | Path | None], run_dir: Path) -> Welcome:
        """Joins the run, and starts from the server's parameters; a new server is given those of worker 0, or the whole
        state that ``brought`` returns, if it returns one."""
        welcome = self.worker.join(spec)
        if not welcome.initialised:
            welcome = self.bring(brought(), run_dir)
        self.worker.begin(welcome)
        return welcome

    def bring(self, state: State | Path | None, run_dir: Path, from_checkpoint: bool = False) -> Welcome:
        """Gives a new server a whole state, that of rank 0, or for None worker 0's parameters."""
        with state_file(state if self._brings else None, run_dir) as path:
            return self.worker.bring_parameters(path, from_checkpoint)

    # Steps

    def begin_step(self) -> None:
        """Notes that a step begins."""
        self.began = time.perf_counter()

    def slowed_down(self) -> float:
        """Returns the seconds of this step so far; a worker that is made slower sleeps first, for experiments."""
        time.sleep((self._slowdown - 1.0) * (time.perf_counter() - self.began))
        return time.perf_counter() - self.began

    def count_left_out(self, left_out: bool) -> None:
        """Counts a local step that was taken, or left out because it had NaN or Inf and so never reaches the server.

        Raises:
            RefusedError: the last :data:`MOST_LEFT_OUT` local steps were left out.
        """
        self._left_out.count(self._left_out.total + left_out)

    # The server's parameters, for validations and checkpoints

    def take_server_parameters(self, fetch: Callable[[], State]) -> State:
        """Gives the model the parameters of the server's state, until :meth:`give_back`; returns the state."""
        self.worker.settle()
        replica, own, state = self.worker.replica, self._own, fetch()
        if own is None:
            self.worker.check_unchanged()
            own = torch.zeros(replica.layout.size, dtype=torch.float32, device="cpu")
            replica.read(own)
        replica.write(state["server"]["parameters"])
        self.state, self._own, self._watch = state, own, ParameterWatch(replica.named)
        self._watch.note()
        return state

    def changed(self) -> str | None:
        """Returns the name of a parameter that has changed since the model has the server's; None if none has."""
        return None if self.state is None else self._watch.changed()

    def give_back(self, changed: str | None = None) -> None:
        """Gives the model the worker's own parameters again, if it has the server's. Where ``changed`` names a
        parameter, values that have changed since stay, but for rounding errors: an optimizer that has gone to other
        weights and back, as schedule-free ones do for a validation, leaves such."""
        if self._own is None or self.state is None:
            return
        own, servers, replica = self._own, self.state["server"]["parameters"], self.worker.replica
        if changed is not None:
            now, size = own.clone(), replica.layout.without_buffers.size
            replica.read(now)
            now[size:] = own[size:]  # a forward pass may change buffers
            least = _ROUNDING * float(servers[:size].abs().mean())
            own = torch.where(torch.isclose(now, servers, _ROUNDING, least), own, now)
        replica.write(own)
        self._own = self.state = None
        self.begin_step()
