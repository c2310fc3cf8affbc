"""A server with plain SGD and a constant learning rate of 1, for tests that need no fairseq."""

from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.server import Layout
from fairseq_async.server.plan import Passes
from fairseq_async.server.process import serve


class Constant:
    learning_rate = 1.0

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, Passes]:
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), method["updates_per_step"])
    return rule, Passes(Constant(), method["max_epoch"])


if __name__ == "__main__":
    serve(build)
