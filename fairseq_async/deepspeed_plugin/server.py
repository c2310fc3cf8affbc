"""``python -m fairseq_async.deepspeed_plugin.server``: the server of a DeepSpeed script that trains by hybrid_async."""

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import Parameter

from fairseq_async import methods
from fairseq_async.algorithms.rule import State
from fairseq_async.deepspeed_plugin import optimizers, schedules
from fairseq_async.errors import ConfigurationError, as_key, spell_options
from fairseq_async.method_spec import JsonObject, MethodSpec, hybrid_options
from fairseq_async.server import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.process import serve
from fairseq_async.server.scheduled_rule import ScheduledRule


class StepSchedule:
    """The learning rate of an optimizer in the server, as a function of its steps.

    Args:
        scheduler: one of DeepSpeed's; None where there is another, or the rate is constant.
        rates: a table of a script's own schedule, see :func:`~fairseq_async.deepspeed_plugin.schedules.tabulate`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: schedules.DeepSpeedSchedule | None,
        rates: schedules.Rates | None = None,
    ) -> None:
        self.optimizer, self.scheduler, self.rates = optimizer, scheduler, rates

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, in the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, steps: int) -> None:
        """Sets the rates of the step after so many steps."""
        schedules.set_schedule(self.scheduler, steps)
        if self.rates is not None:
            schedules.set_rates(self.optimizer, self.rates, steps)

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: these schedules know no epochs."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: these schedules know no epochs."""

    def state_dict(self) -> State:
        """DeepSpeed's own."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: State) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)


def build(spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[ScheduledRule, EpochPlan]:
    """The rule of a run, with its schedule, and its plan.

    Raises:
        ConfigurationError: torch or DeepSpeed does not take the configuration.
    """
    options = hybrid_options(spec)
    views = [Parameter(view) for view in layout.views(parameters)]
    optimizer = optimizers.build(_section(spec, "optimizer") or {}, layout, parameters)
    clip_norm = float(str(spec.framework["clip_norm"]))
    context = methods.GradientRuleContext(optimizer, clip_norm, views, spec.workers, elementwise=True)
    rule = methods.gradient_rule(options.gradient_rule).build(options, context)
    scheduled = ScheduledRule(rule, _schedule(_section(spec, "scheduler"), optimizer))
    return scheduled, EpochPlan(scheduled, spec.max_epoch, spec.whole_steps)


def _section(spec: MethodSpec, name: str) -> JsonObject | None:
    """An optimizer or a schedule, as worker 0 has described it."""
    section = spec.framework.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigurationError(f'"{name}" is {section!r}: not a description of one')
    return section


def _schedule(section: JsonObject | None, optimizer: torch.optim.Optimizer) -> StepSchedule:
    if section is None:
        return StepSchedule(optimizer, None)
    if schedules.is_deepspeeds(section):
        return StepSchedule(optimizer, schedules.build(section, optimizer))
    try:
        rates = TypeAdapter(schedules.Rates).validate_python(section.get("rates"), strict=True)
    except ValidationError as error:
        raise ConfigurationError('"scheduler" has neither a schedule of DeepSpeed\'s nor a table of rates') from error
    if not rates or any(len(row) != len(optimizer.param_groups) for row in rates):
        raise ConfigurationError('"scheduler": "rates" must have one number for each parameter group in each row')
    return StepSchedule(optimizer, None, rates)


if __name__ == "__main__":
    spell_options(as_key)
    serve(build)
