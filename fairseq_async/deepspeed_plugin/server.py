"""``python -m fairseq_async.deepspeed_plugin.server``: the server of a DeepSpeed script that trains by hybrid_async."""

from typing import Any, Protocol

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor
from torch.nn import Parameter

from fairseq_async import methods
from fairseq_async.algorithms.hybrid import pieces
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, as_key, spell_options
from fairseq_async.method_spec import JsonObject, MethodSpec, hybrid_options
from fairseq_async.server import Layout
from fairseq_async.server.plan import EpochPlan
from fairseq_async.server.process import serve
from fairseq_async.server.scheduled_rule import ScheduledRule

# by their names in a DeepSpeed configuration; each steps every element by itself, so a model may be stepped in pieces
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# keys of "params" that DeepSpeed takes and torch's optimizers do not
_KEYS_OF_DEEPSPEED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"}


class Scheduler(Protocol):
    """A learning-rate schedule of DeepSpeed's: ``step(n)`` sets the rate of step n + 1."""

    def step(self, last_batch_iteration: int | None = None, /) -> None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> None: ...


class DeepSpeedSchedule:
    """DeepSpeed's learning-rate schedule of an optimizer in the server, counted in its steps.

    Args:
        scheduler: one of DeepSpeed's; None for a constant rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, steps: int) -> None:
        """Sets the rate of the step after so many steps: DeepSpeed's schedules count from −1."""
        if self.scheduler is not None and steps > 0:
            self.scheduler.step(steps - 1)

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: DeepSpeed's schedules know no epochs."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: DeepSpeed's schedules know no epochs."""

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
    optimizer = _optimizer(_section(spec, "optimizer") or {}, pieces(parameters))
    schedule = DeepSpeedSchedule(optimizer, _schedule(_section(spec, "scheduler"), optimizer))
    clip_norm = float(str(spec.framework["clip_norm"]))
    context = methods.GradientRuleContext(optimizer, clip_norm, views, spec.workers, elementwise=True)
    rule = ScheduledRule(methods.gradient_rule(options.gradient_rule).build(options, context), schedule)
    return rule, EpochPlan(rule, spec.max_epoch, spec.whole_steps)


def _section(spec: MethodSpec, name: str) -> JsonObject | None:
    """A section of DeepSpeed's configuration, as worker 0 has sent it."""
    section = spec.framework.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigurationError(f'"{name}" is {section!r}: not a section of a DeepSpeed configuration')
    return section


def _params(description: JsonObject) -> dict[str, Any]:
    params = description.get("params", {})
    if not isinstance(params, dict):
        raise ConfigurationError(f'"params" is {params!r}: not an object')
    return dict(params)


def _optimizer(description: JsonObject, parameters: list[Parameter]) -> torch.optim.Optimizer:
    name, params = str(description.get("type")).lower(), _params(description)
    if name not in _OPTIMIZERS:
        raise ConfigurationError(f'"optimizer": "type": {description.get("type")}: the server has Adam, AdamW and SGD')
    if name == "adam" and params.get("adam_w_mode", True):
        name = "adamw"  # DeepSpeed's Adam decays weights as AdamW does, by default
    try:
        kept = {key: value for key, value in params.items() if key not in _KEYS_OF_DEEPSPEED}
        return _OPTIMIZERS[name](parameters, **{"weight_decay": 0.0} | kept)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"optimizer": "params": {error}') from error


def _schedule(description: JsonObject | None, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    if description is None:
        return None
    name = str(description.get("type"))
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        raise ConfigurationError(f'"scheduler": "type": {name}: one of {", ".join(lr_schedules.VALID_LR_SCHEDULES)}')
    try:
        return getattr(lr_schedules, name)(optimizer, **_params(description))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"scheduler": "params": {error}') from error


if __name__ == "__main__":
    spell_options(as_key)
    serve(build)
