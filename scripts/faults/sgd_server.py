"""A server with plain SGD and a constant learning rate of 1, which needs no fairseq."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.method.spec import JsonObject, MethodSpec, ServerSettings
from fairseq_async.protocol import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve


class Constant:
    learning_rate = 1.0
    steps = 0.0

    def begin_epoch(self, epoch: int) -> None: ...

    def end_epoch(self, epoch: int, loss: float | None) -> None: ...


def sgd_spec(
    updates_per_step: int = 1, workers: int = 2, compress: JsonObject | None = None, **changes: Any
) -> MethodSpec:
    """Returns hybrid asynchronous SGD; ``changes`` are fields of :class:`MethodSpec` or of its server's settings."""
    of_server = {each.name for each in fields(ServerSettings)} & set(changes)
    server = ServerSettings(**{name: changes.pop(name) for name in of_server})
    options: JsonObject = {"updates_per_step": updates_per_step} | ({"compress": compress} if compress else {})
    return MethodSpec("hybrid_async", workers, options, server, **changes)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, EpochPlan]:
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0), updates_per_step(spec))
    return rule, EpochPlan(Constant(), spec.max_epoch)


def updates_per_step(spec: MethodSpec) -> int:
    updates = spec.options["updates_per_step"]
    assert isinstance(updates, int)
    return updates


if __name__ == "__main__":
    serve(build)
