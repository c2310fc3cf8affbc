"""A worker's half of hybrid asynchronous SGD, for doors whose optimizer steps in the server."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import RefusedError
from fairseq_async.exchange import copy
from fairseq_async.server import ServerClient
from fairseq_async.worker.replica import TensorReplica


class GradientWorker:
    """Pushes mean gradients, and pulls parameters when they have changed.

    Args:
        client: the connection.
        named: fp32 parameters.
        max_refused: gradients with NaN or Inf, in a row, after which the worker stops.

    Attributes:
        shard: this worker's part of the training set, of which it has drawn ``offset`` batches.
    """

    def __init__(self, client: ServerClient, named: Sequence[tuple[str, Parameter]], max_refused: int) -> None:
        self.client, self.max_refused = client, max_refused
        self.replica = TensorReplica(named)
        self._parameters = [parameter for _, parameter in named]
        self.joined = self.finished = False
        self.version = self.sequence = self.done = 0
        self.refused = self.refused_in_a_row = 0
        self.learning_rate = 0.0
        self.last: dict[str, float] = {}

    @property
    def shard(self) -> int:
        return self.client.worker

    @property
    def offset(self) -> int:
        return self.sequence

    @property
    def progress(self) -> float:
        return float(self.version)

    total_progress = progress

    def join(self, method: dict[str, Any]) -> dict[str, Any]:
        """Enters the run; the welcome says whether the server has parameters."""
        return self.client.join(self.replica.layout, method)

    def bring_parameters(self, state: str | None) -> dict[str, Any]:
        """Worker 0's parameters, or the server state in a file, to a new server."""
        self.replica.read(self.client.slot)
        return self.client.initialise(state)

    def begin(self, welcome: dict[str, Any]) -> None:
        """Takes the server's parameters."""
        self.joined, self.sequence, self.refused = True, welcome["sequence"], welcome["refused"]
        self.learning_rate, self.finished = welcome["learning_rate"], welcome["finished"]
        self.version = self.client.pull(self.replica.write)

    def step(self, samples: int, loss: float | None) -> None:
        """Pushes the parameters' ``grad``, the mean over ``samples``.

        Raises:
            RefusedError: the last ``max_refused`` gradients had NaN or Inf.
            ExchangeError: the server is gone; this gradient may be lost.
        """
        started = time.perf_counter()
        answer = self.client.push(
            self._write,
            sequence=self.sequence,
            base_version=self.version,
            weight=float(samples),
            report={"loss": loss, **{name: self.last[name] for name in self.last if name.endswith("seconds")}},
            wait=False,
        )
        pushed = time.perf_counter()
        self.sequence += 1
        self.finished, self.learning_rate = answer["finished"], answer["learning_rate"]
        if answer["version"] != self.version:
            self.version = self.client.pull(self.replica.write)
        self.last = {
            "staleness": answer["staleness"],
            "push_seconds": pushed - started,
            "pull_seconds": time.perf_counter() - pushed,
        }
        self._count_refused(answer["refused"])

    def settle(self) -> None:
        """Nothing is on its way between two calls."""

    def _write(self, slot: Tensor) -> None:
        for view, parameter in zip(self.replica.layout.views(slot), self._parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                copy(view, parameter.grad)

    def _count_refused(self, refused: int) -> None:
        more, self.refused = refused - self.refused, refused
        self.refused_in_a_row = self.refused_in_a_row + more if more else 0
        if self.refused_in_a_row >= self.max_refused:
            raise RefusedError(
                f"the last {self.refused_in_a_row} gradients of worker {self.client.worker} had NaN or Inf and were "
                "refused (max_refused); try a lower learning rate"
            )
