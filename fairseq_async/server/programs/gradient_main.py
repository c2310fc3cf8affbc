"""The program of the server of ``hybrid_async`` with torch's own optimizers."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fairseq_async.algorithms import Rule
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.optimizers.learning_rates import Rates, RateTable
from fairseq_async.server.optimizers.scheduled_rule import Schedule, ScheduledRule
from fairseq_async.server.optimizers.several import SeveralOptimizers
from fairseq_async.server.optimizers.torch_optimizer import (
    PARTS,
    OptimizerSpec,
    build_optimizer,
    is_of_plugin,
    parts_of,
)
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs.program import serve


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, EpochPlan]:
    """Builds the rule of a run, with its optimizer and learning rates, and its plan.

    Raises:
        ConfigurationError: no optimizer can be built from the description.
    """
    if PARTS in spec.framework:
        several = _several(spec, layout, parameters)
        return several, EpochPlan(several, spec.max_epoch, spec.whole_steps)
    inner = OptimizerSpec.from_json(spec.framework)
    return assemble(spec, layout, parameters, inner, partial(_table, inner.learning_rates))


def assemble(
    spec: MethodSpec,
    layout: Layout,
    parameters: Tensor,
    inner: OptimizerSpec,
    schedule: Callable[[Optimizer], Schedule],
) -> tuple[ScheduledRule, EpochPlan]:
    """Builds rule and plan as :func:`build` does, with the schedule that ``schedule`` makes for the server's optimizer.

    Raises:
        ConfigurationError: no optimizer can be built from the description.
    """
    scheduled = _scheduled(spec, layout, parameters, inner, schedule)
    return scheduled, EpochPlan(scheduled, spec.max_epoch, spec.whole_steps)


def _scheduled(
    spec: MethodSpec,
    layout: Layout,
    parameters: Tensor,
    inner: OptimizerSpec,
    schedule: Callable[[Optimizer], Schedule],
) -> ScheduledRule:
    optimizer = build_optimizer(inner, layout, parameters)
    views = [Parameter(view) for view in layout.views(parameters)]
    # a user's own class may count its steps in itself, or look at all its tensors together: threads step copies of it
    rest = {"clip_norm": inner.clip_norm, "tensors": views, "elementwise": not is_of_plugin(inner)}
    return ScheduledRule.of(spec.hybrid, spec.workers, optimizer, schedule(optimizer), **rest)


def _several(spec: MethodSpec, layout: Layout, parameters: Tensor) -> SeveralOptimizers:
    parts = parts_of(spec.framework)
    rules = [_scheduled(spec, layout, parameters, part, partial(_table, part.learning_rates)) for part in parts]
    tensors = [sum(1 << number for group in part.parameter_groups for number in group.tensors) for part in parts]
    return SeveralOptimizers(rules, tensors, spec.hybrid.updates_per_step or spec.workers)


def _table(rates: Rates, optimizer: Optimizer) -> RateTable:
    return RateTable(optimizer, rates)


if __name__ == "__main__":
    serve(build)
