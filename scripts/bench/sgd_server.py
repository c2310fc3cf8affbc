"""``python -m sgd_server``: a server whose optimizer costs next to nothing, so that the exchange can be timed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.server import Layout
from fairseq_async.server.plan import Passes
from fairseq_async.server.process import serve

METHOD = {"barrier": 0, "last_version": None, "max_epoch": 0}  # what every method says; updates_per_step is added


@dataclass
class Constant:
    """A learning rate that stays."""

    learning_rate: float

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, Passes]:
    """Hybrid accumulation with plain SGD."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(view) for view in layout.views(parameters)], lr=0.01)
    return HybridAccumulation(optimizer, method["updates_per_step"]), Passes(Constant(0.01), method["max_epoch"])


if __name__ == "__main__":
    serve(build)
