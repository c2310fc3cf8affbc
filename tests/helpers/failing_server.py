"""A server whose rule fails in the middle of the third update, once: a file tells the next process of it."""

import os
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve
from scripts.faults.sgd_server import Constant

MARKER = "FAILED_ONCE"  # the variable with the file's path


class FailingRule(HybridAccumulation):
    def apply(self, parameters: Tensor, update: Update) -> float:
        marker = Path(os.environ[MARKER])
        if update.sequence == 2 and not marker.exists():
            marker.touch()
            parameters[0] += 1000.0
            raise MemoryError("no memory for the rest")
        return super().apply(parameters, update)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[FailingRule, EpochPlan]:
    return FailingRule(torch.optim.SGD([parameters], lr=1.0), 1), EpochPlan(Constant(), spec.max_epoch)


if __name__ == "__main__":
    serve(build)
