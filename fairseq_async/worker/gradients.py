"""A worker's half of hybrid asynchronous SGD, for doors whose optimizer steps in the server."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.exchange import pack
from fairseq_async.server import ServerClient
from fairseq_async.worker.half import Half
from fairseq_async.worker.replica import TensorReplica


class GradientWorker(Half):
    """Pushes mean gradients, and pulls parameters when they have changed.

    Args:
        client: the connection.
        named: parameters, as the model has them.
        max_refused: gradients with NaN or Inf, in a row, after which the worker stops.

    Attributes:
        shard: this worker's part of the training set, of which it has drawn ``offset`` batches.
        waited: seconds for which this worker's next push has waited for the slot already.
    """

    def __init__(self, client: ServerClient, named: Sequence[tuple[str, Parameter]], max_refused: int) -> None:
        super().__init__(client, TensorReplica(named), max_refused)
        self._parameters = [parameter for _, parameter in named]
        self.learning_rate = self.waited = 0.0
        self.last = {"staleness": 0.0, "push_seconds": 0.0, "pull_seconds": 0.0}

    @property
    def shard(self) -> int:
        return self.client.worker % self.client.workers  # one that joins shares with another

    @property
    def offset(self) -> int:
        return self.sequence

    @property
    def progress(self) -> float:
        return float(self.version)

    total_progress = progress

    def begin(self, welcome: dict[str, Any]) -> None:
        """Takes the server's parameters and the learning rate."""
        super().begin(welcome)
        self.learning_rate = welcome["learning_rate"]

    def scale_into_slot(self, factor: float) -> None:
        """Multiplies the parameters' ``grad``, which is fp32 on the CPU. The products are written into the slot, where
        ``grad`` stays until the push, which has nothing to copy then."""
        self.waited = self.client.prepare(partial(self._scale_into, factor))

    def step(self, samples: int, loss: float | None) -> None:
        """Pushes the parameters' ``grad``, the mean over ``samples``; otherwise as :meth:`exchange`."""
        self.exchange(self._write, float(samples), {"loss": loss})

    def exchange(
        self,
        write: Callable[[Tensor], object],
        weight: float,
        report: dict[str, Any],
        wait: bool = False,
        norm: float | None = None,
    ) -> None:
        """Pushes what ``write`` puts into the slot, and pulls the parameters if they have changed.

        Args:
            weight: of this gradient among those that are added up.
            report: for ``events.jsonl``; how long the exchange before this one took is added.
            wait: for the receipt, also of a gradient that will not be followed by a step.
            norm: the gradient's L2 norm where it is known, which saves the server from finding it.

        Raises:
            RefusedError: the last ``max_refused`` gradients had NaN or Inf.
            ExchangeError: the server is gone; this gradient may be lost.
        """
        started = time.perf_counter()
        took = {name: seconds for name, seconds in self.last.items() if name.endswith("seconds")}
        numbers = {"sequence": self.sequence, "base_version": self.version, "weight": weight}
        answer = self.client.push(write, **numbers, report=report | took, wait=wait, norm=norm)
        pushed = time.perf_counter()
        self.sequence += 1
        self.finished, self.learning_rate = answer["finished"], answer["learning_rate"]
        if answer["version"] != self.version:
            self.pull()
        self.last = {
            "staleness": answer["staleness"],
            "push_seconds": self.waited + pushed - started,
            "pull_seconds": time.perf_counter() - pushed,
        }
        self.waited = 0.0
        self.refusals.count(answer["refused"])

    def _scale_into(self, factor: float, slot: Tensor) -> None:
        for parameter, room in zip(self._parameters, self.replica.layout.views(slot), strict=True):
            if parameter.grad is not None:
                parameter.grad = torch.mul(parameter.grad, factor, out=room)

    def _write(self, slot: Tensor) -> None:
        pack(slot, map(gradient, self._parameters))


def gradient(parameter: Parameter) -> Tensor:
    """Its ``grad``; zeros, of one element in memory, where no loss depends on it."""
    return parameter.new_zeros(()).expand_as(parameter) if parameter.grad is None else parameter.grad
