"""Workers of a replay whose gradients are half of what they started from: a wrong start is a wrong update."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fairseq_async.algorithms import Rule
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout, Push, Report
from fairseq_async.server.plan import Plan


class HalvingWorker:
    """``spoilt`` is the update that is NaN; ``has_position`` whether it says where it is in its data."""

    def __init__(
        self,
        layout: Layout,
        spoilt: int = -1,
        weight: Callable[[int], float] = lambda sequence: 1.0,
        has_position: bool = True,
    ) -> None:
        self.layout, self.spoilt, self.weight, self.has_position = layout, spoilt, weight, has_position
        self.start, self.version, self.sequence = torch.zeros(layout.size), 0, -1

    def start_from(self, parameters: Tensor, version: int) -> None:
        self.start, self.version = parameters.clone(), version

    def compute(self) -> tuple[Push, Tensor]:
        self.sequence += 1
        factor = float("nan") if self.sequence == self.spoilt else 0.5
        report = Report(position={"seen": self.sequence} if self.has_position else None)
        return Push(self.sequence, self.version, self.weight(self.sequence), report), factor * self.start


class HalvingRun:
    """``build`` is that of the server."""

    threads = 1

    def __init__(
        self,
        workers: Mapping[int, HalvingWorker],
        build: Callable[[MethodSpec, Layout, Tensor], tuple[Rule, Plan]],
    ) -> None:
        self.workers, self.build = workers, build
