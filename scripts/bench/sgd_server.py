"""A server whose optimizer costs next to nothing, so that the exchange can be timed: ``python -m`` this module."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve
from scripts.faults.sgd_server import updates_per_step


@dataclass
class Constant:
    """A schedule with a constant learning rate."""

    learning_rate: float
    steps: float = 0.0

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, EpochPlan]:
    """Builds hybrid accumulation with plain SGD."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(view) for view in layout.views(parameters)], lr=0.01)
    return HybridAccumulation(optimizer, updates_per_step(spec)), EpochPlan(Constant(0.01), spec.max_epoch)


if __name__ == "__main__":
    serve(build)
