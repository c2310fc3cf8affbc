"""The server's half of ``hybrid_async``: fairseq's optimizer and schedule, built over the flat parameters."""

import ast
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fairseq.optim import FairseqOptimizer, build_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, build_lr_scheduler
from fairseq.registry import REGISTRIES
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.hybrid import pieces
from fairseq_async.errors import ConfigurationError
from fairseq_async.server.layout import Layout
from fairseq_async.server.plan import Passes


class ScheduledAccumulation(HybridAccumulation):
    """Hybrid accumulation whose learning rate follows a fairseq schedule, counted in applied updates."""

    def __init__(
        self,
        optimizer: FairseqOptimizer,
        schedule: FairseqLRScheduler,
        updates_per_step: int,
        clip_norm: float,
        tensors: Sequence[Tensor],
    ) -> None:
        super().__init__(optimizer.optimizer, updates_per_step, clip_norm, tensors)
        self.fairseq_optimizer, self.schedule, self.steps = optimizer, schedule, 0
        self._follow()

    @property
    def learning_rate(self) -> float:
        return float(self.fairseq_optimizer.get_lr())

    def apply(self, parameters: Tensor, update: Update) -> bool:
        stepped = super().apply(parameters, update)
        if stepped:
            self.steps += 1
            self._follow()
        return stepped

    def begin_epoch(self, epoch: int) -> None:
        self.schedule.step_begin_epoch(epoch)
        self._follow()

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        self.schedule.step(epoch, loss)
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]
        if state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._follow()

    def _follow(self) -> None:
        self.schedule.step_update(self.steps)


def build(method: dict[str, Any], layout: Layout, parameters: Tensor) -> tuple[ScheduledAccumulation, Passes]:
    """Rule and plan from a method's description; the rule is the schedule too.

    Raises:
        ConfigurationError: fairseq does not take the configuration.
    """
    views = [Parameter(view) for view in layout.views(parameters)]
    inner, scheduler = method["inner_optimizer"], method["lr_scheduler"]
    try:
        optimizer = build_optimizer(_config(inner, "optimizer"), views)
        if optimizer.supports_flat_params:
            optimizer = build_optimizer(_config(inner, "optimizer"), pieces(parameters))
        schedule = build_lr_scheduler(_config(scheduler, "lr_scheduler"), optimizer)
        rule = ScheduledAccumulation(optimizer, schedule, method["updates_per_step"], method["clip_norm"], views)
    except Exception as error:  # fairseq finds mistakes by whatever goes wrong with them
        raise ConfigurationError(
            f"--inner-optimizer {inner['_name']} with --lr-scheduler {scheduler['_name']}: {error}"
        ) from error
    return rule, Passes(rule, method["max_epoch"])


def _config(description: dict[str, Any], registry: str) -> Any:
    # fairseq evaluates a string to get betas: what came over a wire is parsed first, and must be two numbers
    betas = {key: _parse_pair(value) for key, value in description.items() if key.endswith("_betas")}
    if description["_name"] in REGISTRIES[registry]["dataclass_registry"]:
        return OmegaConf.create(description | betas)
    old_style = {key: str(value) for key, value in betas.items()}
    return Namespace(**description | old_style, **{registry: description["_name"]})


def _parse_pair(value: Any) -> list[float]:
    first, second = ast.literal_eval(value) if isinstance(value, str) else value
    return [float(first), float(second)]
