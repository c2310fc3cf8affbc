"""``python -m fairseq_async.server.gradient_main``: the server of ``hybrid_async`` with torch's own optimizers."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fairseq_async import methods
from fairseq_async.method_spec import MethodSpec, hybrid_options
from fairseq_async.server.layout import Layout
from fairseq_async.server.optimizers.learning_rates import RateTable
from fairseq_async.server.optimizers.scheduled_rule import Schedule, ScheduledRule
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, build_optimizer
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.program import serve


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[ScheduledRule, EpochPlan]:
    """Builds the rule of a run, with its optimizer and learning rates, and its plan.

    Raises:
        ConfigurationError: no optimizer can be built from the description.
    """
    inner = OptimizerSpec.from_json(spec.framework)
    return assemble(spec, layout, parameters, inner, lambda optimizer: RateTable(optimizer, inner.learning_rates))


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
    options = hybrid_options(spec)
    optimizer = build_optimizer(inner, layout, parameters)
    views = [Parameter(view) for view in layout.views(parameters)]
    context = methods.GradientRuleContext(optimizer, inner.clip_norm, views, spec.workers, elementwise=True)
    rule = methods.gradient_rule(options.gradient_rule).build(options, context)
    scheduled = ScheduledRule(rule, schedule(optimizer))
    return scheduled, EpochPlan(scheduled, spec.max_epoch, spec.whole_steps)


if __name__ == "__main__":
    serve(build)
