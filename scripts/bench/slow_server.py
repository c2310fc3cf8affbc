"""``python -m slow_server``: a server that sleeps with each gradient, so that it is saturated without a processor."""

import time

from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.program import serve
from scripts.bench import sgd_server

SECONDS = "seconds"  # of the sleep, in the method's description


class SlowAccumulation(HybridAccumulation):
    """Hybrid accumulation that takes its time."""

    seconds = 0.0

    def apply(self, parameters: Tensor, update: Update) -> float:
        time.sleep(self.seconds)
        return super().apply(parameters, update)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[HybridAccumulation, EpochPlan]:
    """As in :mod:`scripts.bench.sgd_server`, and slower."""
    plain, plan = sgd_server.build(spec, layout, parameters)
    rule, seconds = SlowAccumulation(plain.optimizer, plain.updates_per_step), spec.framework[SECONDS]
    assert isinstance(seconds, float)
    rule.seconds = seconds
    return rule, plan


if __name__ == "__main__":
    serve(build)
