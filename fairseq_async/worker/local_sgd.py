"""A worker's half of local SGD: H steps of its own, then an exchange with the server."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fairseq_async.server import ServerClient
from fairseq_async.worker.half import Half
from fairseq_async.worker.replica import Replica


class LocalSGD(Half):
    """Counts local steps, and exchanges when as many are done as the server has asked for.

    The inner optimizer's state is not touched by an exchange. The slot holds θ_start between two exchanges, and the
    pseudo-gradient θ_start − θ is computed in place there, so that a worker keeps no further copy of the model.

    Args:
        client: the connection; joins with ``method``.
        replica: the parameters that the inner optimizer steps.
        max_refused: refused updates in a row after which the worker stops.
        clock: seconds.

    Attributes:
        local_steps: what the server has asked for, and ``done`` of them.
        shard: the part of the training set to draw from; None where the server chooses none.
        offset: how many batches of the shard others have drawn, or are drawing, before this worker's.
    """

    def __init__(
        self,
        client: ServerClient,
        replica: Replica,
        max_refused: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(client, replica, max_refused)
        self.clock = clock
        self.shard: int | None = None
        self.offset = self.local_steps = 0
        self.epochs = self.tokens = 0.0  # of the data since the last exchange, where somebody counts them
        self._place = {"progress": 0.0, "pace": 1.0, "total_progress": 0.0}
        self._losses: list[float | Tensor] = []
        self._step_seconds: list[float] = []
        self._waited = 0.0

    @property
    def progress(self) -> float:
        """Where the learning-rate schedule is, in mean local steps per worker: that of the shard or of the run, not
        this worker's own count, at whose end a fast worker would be long before the others."""
        return self._place["progress"] + self._place["pace"] * self.done

    @property
    def total_progress(self) -> float:
        """Mean local steps per worker that the server had when this one last heard of it."""
        return self._place["total_progress"]

    def begin(self, welcome: dict[str, Any]) -> None:
        """Takes the server's parameters and the first assignment."""
        welcome = self.wait_for_work(welcome)
        super().begin(welcome)
        self._take(welcome)

    def step(self, seconds: float, loss: float | Tensor | None = None, position: dict[str, Any] | None = None) -> bool:
        """After each step of the inner optimizer; True when it was followed by an exchange.

        Args:
            seconds: of the step, without what it waited for others.
            loss: of its batch, for the log; a scalar tensor is read only when it is needed.
            position: where this worker is in its data, for its restart.

        Raises:
            RefusedError: the last ``max_refused`` updates had NaN or Inf.
            ExchangeError: the server is gone.
        """
        self.count(seconds, loss)
        if self.done < self.local_steps:
            return False
        self.exchange(position)
        return True

    def count(self, seconds: float, loss: float | Tensor | None) -> None:
        """One local step more."""
        self.done += 1
        self._step_seconds.append(seconds)
        if loss is not None:
            self._losses.append(loss)

    def exchange(self, position: dict[str, Any] | None = None) -> None:
        """Sends the local steps that are done, and starts again from the server's parameters."""
        started = self.clock()
        answer = self.wait_for_work(self.client.push(self.replica.subtract, **self.message(position)))
        self.sequence += 1
        self._take(answer)
        self.version = self.client.pull(self.replica.write)
        self._waited = self.clock() - started
        self._note(answer)

    def message(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """What goes with the pseudo-gradient."""
        start = {"sequence": self.sequence, "base_version": self.version, "weight": float(self.done)}
        return start | {"report": self._report(position), "wait": True}

    def wait_for_work(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The same answer; where there is nothing to do, with that to the question for more, as late as it may come."""
        while answer.get("idle") and not answer["finished"]:
            answer |= self.client.ask({"kind": "wait"})
        return answer

    def _report(self, position: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "local_steps": self.done,
            "step_seconds": statistics.median(self._step_seconds) if self._step_seconds else 0.0,
            "computing_seconds": sum(self._step_seconds),
            "waiting_seconds": self._waited,
            "loss": statistics.fmean(map(float, self._losses)) if self._losses else None,
            "shard": self.shard,
            "offset": self.offset,
            "progress": self._place["progress"],
            "pace": self._place["pace"],
            "epochs": self.epochs,
            "tokens": self.tokens,
            "position": position,
        }

    def _take(self, answer: dict[str, Any]) -> None:
        """The next assignment."""
        self.finished = answer["finished"]
        self.local_steps, self.shard, self.offset = answer["local_steps"], answer["shard"], answer["offset"]
        self._place = {name: answer[name] for name in self._place}
        self.restart_counts()

    def restart_counts(self) -> None:
        """A round begins."""
        self.epochs = self.tokens = 0.0
        self.done, self._losses, self._step_seconds = 0, [], []

    def _note(self, answer: dict[str, Any]) -> None:
        self.last = {name: answer[name] for name in ("staleness", "norm", "cosine")}
        self.last |= {"local_steps": float(self.local_steps), "waiting_seconds": self._waited}
        self.refusals.count(answer["refused"])
