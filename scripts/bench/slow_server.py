"""A server that sleeps with each gradient: saturated without a processor's time. It is run as ``python -m`` this."""

import time

from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from fairseq_async.algorithms import Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.learning_rates import StepSchedule
from fairseq_async.server.optimizers.scheduled_rule import ScheduledRule
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve
from scripts.faults.sgd_server import updates_per_step

SECONDS = "seconds"  # key in the method's description: seconds of sleep per parameter, so a shard sleeps for its part


class SlowAccumulation(ScheduledRule):
    """Hybrid accumulation that sleeps before each update."""

    def __init__(self, optimizer: Optimizer, updates_per_step: int, seconds: float) -> None:
        super().__init__(optimizer, updates_per_step, StepSchedule(optimizer))
        self.seconds = seconds

    def apply(self, parameters: Tensor, update: Update) -> float:
        time.sleep(self.seconds)
        return super().apply(parameters, update)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[ScheduledRule, EpochPlan]:
    """Builds slow accumulation with plain SGD and a constant learning rate."""
    seconds = spec.framework[SECONDS]
    assert isinstance(seconds, float)
    optimizer = SGD([Parameter(view) for view in layout.views(parameters)], lr=0.01)
    rule = SlowAccumulation(optimizer, updates_per_step(spec), seconds * layout.size)
    return rule, EpochPlan(rule, spec.max_epoch)


if __name__ == "__main__":
    serve(build)
