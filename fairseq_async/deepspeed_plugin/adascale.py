"""AdaScale in DeepSpeed's engine."""

import math
from typing import Any

import torch
import torch.distributed as dist

from fairseq_async.collective.adascale import AdaScale
from fairseq_async.deepspeed_plugin import gradients
from fairseq_async.deepspeed_plugin.engine import check_scheduler, follow
from fairseq_async.deepspeed_plugin.group import GroupEngine, finite, on_any_rank
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.config import AdaScaleOptions

_STATE = "fairseq_async.adascale"


class AdaScaleEngine(GroupEngine):
    """Steps as far as the batches of a step are worth; the schedule follows scale-invariant steps."""

    options: AdaScaleOptions

    def enter(self, options: AdaScaleOptions) -> None:
        super().enter(options)
        check_scheduler(self.lr_scheduler)
        name = type(self.basic_optimizer).__name__.lower()
        if not any(known in name for known in ("sgd", "adam")):
            raise ConfigurationError(f"adascale has rules for SGD and Adam, and the optimizer is {name}")
        accumulation = self.gradient_accumulation_steps()
        scale = options.scale_of(dist.get_world_size() * accumulation)
        masters = gradients.masters(self.optimizer)
        if options.estimator == "differences" and masters is not None:
            raise ConfigurationError("adascale: the estimator differences is for fp32 without ZeRO: leave it out")
        self.adascale = AdaScale(
            self.basic_optimizer,
            scale,
            accumulation,
            estimator=options.estimator,
            adaptive="adam" in name,
            smoothing=options.smoothing,
            interval=options.interval,
            masters=masters,
            preconditioned="adam" in name and masters is None,
            reduced=None if masters is None else lambda: gradients.reduced(self),
            partitioned=self.zero_optimization(),
        )

    @property
    def progress(self) -> float:
        return self.adascale.scale_invariant_steps

    def save_checkpoint(self, save_dir: str, tag: Any = None, client_state: Any = None, **kwargs: Any) -> Any:
        """DeepSpeed's, with the averages and scale-invariant steps."""
        state = {**(client_state or {}), _STATE: self.adascale.statistics()}
        return super().save_checkpoint(save_dir, tag, state, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """S is not in it: a run may go on with more or fewer ranks."""
        path, state = super().load_checkpoint(*args, **kwargs)
        if path is not None and _STATE in state:
            self.adascale.load_statistics(state[_STATE])
            follow(self.lr_scheduler, self.progress)
        return path, state

    def _take_model_step(self, lr_kwargs: Any) -> None:
        loss_scale = float(getattr(self.optimizer, "cur_scale", 1.0)) if self.fp16_enabled() else 1.0
        self.adascale.measure(loss_scale, in_gradients=loss_scale)
        bad = on_any_rank(not finite(gradients.of(self)), torch.device(self.device))
        if self._calling(self._skips, bad):
            self.adascale.forget()
            return
        with self.adascale.stretched():
            super()._take_model_step(lr_kwargs)
        if self._step_applied:
            self.adascale.advance()
        else:
            self.adascale.forget()
        follow(self.lr_scheduler, self.progress)
        self._log()

    def _log(self) -> None:
        """To DeepSpeed's own monitor, by samples as its other curves."""
        if self.monitor.enabled:
            whole = self.adascale.gains.whole
            values = {"gain": whole.gain, "noise_scale": whole.noise_scale, "variance": whole.variance}
            values |= {"square_mean": whole.square_mean, "scale_invariant_steps": whole.scale_invariant_steps}
            scalars = [(f"AdaScale/{name}", value, self.global_samples) for name, value in values.items()]
            self.monitor.write_events([each for each in scalars if math.isfinite(each[1])])
