"""``python -m fairseq_async.server.programs.local_sgd_main``: the server of a local SGD run, for every front end."""

from torch import Tensor

from fairseq_async.algorithms import FragmentedRule, Rule, WorkerBuffers
from fairseq_async.errors import ConfigurationError, option
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec
from fairseq_async.options.config import AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.protocol.layout import NO_BUFFERS, Layout
from fairseq_async.server.local_step_plan import LocalStepPlan
from fairseq_async.server.programs.program import serve


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, LocalStepPlan]:
    """Builds the outer rule of a method, and the plan of its local steps.

    Raises:
        ConfigurationError: there is no such rule, or a value is out of its range.
    """
    options = spec.local_sgd
    try:
        return _build_rule(spec, options, layout), LocalStepPlan(
            workers=spec.workers,
            local_steps=options.local_steps // spec.fragments,
            total_steps=options.total_steps,
            dynamic_local_steps=isinstance(options, AsyncLocalSGDOptions) and options.dynamic_local_steps,
            shards=spec.shards,
            seed=options.seed,
            max_epoch=spec.max_epoch,
            barrier=spec.full_rounds,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _build_rule(spec: MethodSpec, options: LocalSGDOptions, layout: Layout) -> Rule:
    """Builds the outer rule, round which :class:`WorkerBuffers` treats the model's buffers."""
    if options.buffers == "own":
        return _outer_rule(spec, options, layout)
    parameters = layout.without_buffers
    if parameters.size == layout.size:
        raise ConfigurationError(NO_BUFFERS.format(option("buffers"), options.buffers))
    rule = _outer_rule(spec, options, parameters)
    return WorkerBuffers(rule, parameters.size, spec.workers, average=options.buffers == "average")


def _outer_rule(spec: MethodSpec, options: LocalSGDOptions, layout: Layout) -> Rule:
    """Builds the outer rule; with several fragments, one for each of them."""
    outer, fragments = methods.outer_rule(options.outer), layout.fragments(spec.fragments)
    rules = []
    for fragment in fragments:
        segments = layout.segments[fragment.tensors]
        sizes, names, shapes = zip(*((each.size, each.name, each.shape) for each in segments), strict=True)
        rules.append(outer.build(options, methods.RuleContext(spec.workers, sizes, names, shapes)))
    return rules[0] if len(rules) == 1 else FragmentedRule(fragments, rules)


if __name__ == "__main__":
    serve(build)
