"""The loss scale of a worker of hybrid_async in fp16. Its gradients are divided by it on their way to the server."""

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """DeepSpeed's own loss scaler, with the options of the configuration's section ``"fp16"``.

    A scale that can fall no further, or is fixed, lets gradients with NaN or Inf through: the server refuses and counts
    them.

    Args:
        section: the configuration's; None where the model is not in fp16, for a scale of 1.
    """

    def __init__(self, section: dict[str, Any] | None = None) -> None:
        given = DeepSpeedFP16Config(**section or {"loss_scale": 1.0})
        dynamic = {
            "init_scale": 2.0**given.initial_scale_power,
            "scale_window": given.loss_scale_window,
            "min_scale": float(given.min_loss_scale),
            "delayed_shift": given.hysteresis,
            "consecutive_hysteresis": given.consecutive_hysteresis,
            "raise_error_at_min_scale": False,
        }
        self._scaler = CreateLossScaler(torch.half, given.loss_scale, given.loss_scale == 0, dynamic)

    @property
    def value(self) -> float:
        return float(self._scaler.loss_scale)

    def skips(self, finite: bool) -> bool:
        """Follows a step's gradient, which is finite or not; returns whether the step is to be skipped, since the scale
        falls."""
        falls = not finite and self._scaler.dynamic and self.value > self._scaler.min_scale
        if finite or falls:
            self._scaler.update_scale(not finite)
        return bool(falls)

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self._scaler, name) for name in _STATE if hasattr(self._scaler, name)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in state.keys() & set(self.state_dict()):
            setattr(self._scaler, name, state[name])
