"""``python -m fairseq_async.deepspeed_plugin.server``: the server of a DeepSpeed script that trains by hybrid_async."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.hybrid import pieces
from fairseq_async.errors import ConfigurationError
from fairseq_async.server import Layout
from fairseq_async.server.plan import Passes
from fairseq_async.server.process import serve

# each takes every element by itself
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_ONLY_DEEPSPEEDS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"}


class ScheduledSteps(HybridAccumulation):
    """Hybrid accumulation whose learning rate follows a schedule of DeepSpeed's, counted in applied updates."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        updates_per_step: int,
        clip_norm: float,
        tensors: Sequence[Tensor],
    ) -> None:
        super().__init__(optimizer, updates_per_step, clip_norm, tensors)
        self.schedule = schedule

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def begin_epoch(self, epoch: int) -> None:
        """DeepSpeed's schedules know no epochs."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """DeepSpeed's schedules know no epochs."""

    def apply(self, parameters: Tensor, update: Update) -> bool:
        stepped = super().apply(parameters, update)
        if stepped and self.schedule is not None:
            self.schedule.step()
        return stepped

    def state_dict(self) -> dict[str, Any]:
        schedule = None if self.schedule is None else self.schedule.state_dict()
        return super().state_dict() | {"schedule": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[ScheduledSteps, Passes]:
    """Rule and plan from a method's description.

    Raises:
        ConfigurationError: torch or DeepSpeed does not take the configuration.
    """
    views = [Parameter(view) for view in layout.views(parameters)]
    optimizer = _optimizer(method["optimizer"], pieces(parameters))
    schedule = _schedule(method["scheduler"], optimizer)
    rule = ScheduledSteps(optimizer, schedule, method["updates_per_step"], method["clip_norm"], views)
    return rule, Passes(rule, max_epoch=0)


def _optimizer(description: dict[str, Any], parameters: list[Parameter]) -> torch.optim.Optimizer:
    name, params = str(description["type"]).lower(), dict(description.get("params", {}))
    if name not in _OPTIMIZERS:
        raise ConfigurationError(f'"optimizer": "type": {description["type"]}: the server has Adam, AdamW and SGD')
    if name == "adam" and params.get("adam_w_mode", True):
        name = "adamw"  # as DeepSpeed's Adam does unless it is told otherwise
    try:
        kept = {key: value for key, value in params.items() if key not in _ONLY_DEEPSPEEDS}
        return _OPTIMIZERS[name](parameters, **{"weight_decay": 0.0} | kept)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"optimizer": "params": {error}') from error


def _schedule(description: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    if description is None:
        return None
    name = str(description.get("type"))
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        raise ConfigurationError(f'"scheduler": "type": {name}: one of {", ".join(lr_schedules.VALID_LR_SCHEDULES)}')
    try:
        return getattr(lr_schedules, name)(optimizer, **description.get("params", {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"scheduler": "params": {error}') from error


if __name__ == "__main__":
    serve(build)
