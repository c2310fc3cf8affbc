"""``python -m fairseq_async.deepspeed_plugin.server``: the server of a DeepSpeed script that trains by hybrid_async."""

from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from fairseq_async.algorithms import Rule
from fairseq_async.deepspeed_plugin import schedules
from fairseq_async.deepspeed_plugin.server_description import SCHEDULER
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.scheduled_rule import Schedule
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.programs import gradient_main
from fairseq_async.server.programs.program import serve


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, EpochPlan]:
    """Builds the rule of a run, with its schedule, and its plan.

    Raises:
        ConfigurationError: torch or DeepSpeed does not take the configuration.
    """
    section = spec.framework.get(SCHEDULER)
    if section is None:
        return gradient_main.build(spec, layout, parameters)
    if not isinstance(section, dict) or not schedules.is_deepspeeds(section):
        raise ConfigurationError(f'"{SCHEDULER}" is {section!r}: not a description of one of DeepSpeed\'s')
    inner = OptimizerSpec.from_json({key: value for key, value in spec.framework.items() if key != SCHEDULER})
    return gradient_main.assemble(spec, layout, parameters, inner, partial(_follow, section))


def _follow(section: JsonObject, optimizer: Optimizer) -> Schedule:
    return schedules.NamedSchedule(optimizer, schedules.build(section, optimizer))


if __name__ == "__main__":
    serve(build)
