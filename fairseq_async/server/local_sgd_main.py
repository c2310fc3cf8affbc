"""``python -m fairseq_async.server.local_sgd_main``: the server of a local SGD run, for every front end."""

from torch import Tensor

from fairseq_async import methods
from fairseq_async.algorithms import Rule
from fairseq_async.config import AsyncLocalSGDOptions
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import MethodSpec, local_sgd_options
from fairseq_async.server.layout import Layout
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.program import serve


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, LocalStepPlan]:
    """The outer rule of a method, and the plan of its local steps.

    Raises:
        ConfigurationError: a rule that there is not, or a value out of its range.
    """
    options = local_sgd_options(spec)
    sizes, names = zip(*((segment.size, segment.name) for segment in layout.segments), strict=True)
    context = methods.RuleContext(spec.workers, sizes, names)
    try:
        return methods.outer_rule(options.outer).build(options, context), LocalStepPlan(
            workers=spec.workers,
            maximum=options.local_steps,
            total_steps=options.total_steps,
            dynamic=isinstance(options, AsyncLocalSGDOptions) and options.dynamic_local_steps,
            shards=spec.shards,
            seed=options.seed,
            max_epoch=spec.max_epoch,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


if __name__ == "__main__":
    serve(build)
