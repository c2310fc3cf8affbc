"""DeepSpeed's engine for AdaScale."""

import math

import torch
import torch.distributed as dist

from fairseq_async.collective.adascale import AdaScale
from fairseq_async.deepspeed_plugin.compat import keeps_parts_of_gradients, loss_scale_of, optimizer_gradients
from fairseq_async.deepspeed_plugin.engines import tensors
from fairseq_async.deepspeed_plugin.engines.engine import ClientState
from fairseq_async.deepspeed_plugin.engines.synchronous import SynchronousEngine, on_any_rank
from fairseq_async.deepspeed_plugin.schedules import check_schedule, set_schedule
from fairseq_async.errors import ConfigurationError
from fairseq_async.options.config import AdaScaleOptions
from fairseq_async.worker.start.process import errors_in_one_line

_STATE = "fairseq_async.adascale"  # the key in a checkpoint's client state


class AdaScaleEngine(SynchronousEngine):
    """The engine of AdaScale: steps with learning rates multiplied by AdaScale's gains.

    The learning-rate schedule follows scale-invariant steps, which are also the progress of the run.
    """

    options: AdaScaleOptions
    adascale: AdaScale

    def set_up(self, options: AdaScaleOptions) -> None:
        """Sets the attributes of this class; all ranks call it.

        Raises:
            ConfigurationError: the configuration does not go with AdaScale, or the ranks differ.
        """
        self.set_up_group(options)
        check_schedule(self.lr_scheduler)
        name = type(self.basic_optimizer).__name__.lower()
        if not any(known in name for known in ("sgd", "adam")):
            raise ConfigurationError(f"adascale has rules for SGD and Adam, and the optimizer is {name}")
        accumulation = self.gradient_accumulation_steps()
        scale = options.scale_of(dist.get_world_size() * accumulation)
        masters = tensors.masters_of(self.optimizer)
        if options.estimator == "differences" and masters is not None:
            raise ConfigurationError('"estimator": "differences" is for fp32 without ZeRO: leave it out')
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
            reduced=None if masters is None else lambda: optimizer_gradients(self.optimizer),
            partitioned=keeps_parts_of_gradients(self.optimizer),
        )

    @property
    def progress(self) -> float:
        """Scale-invariant steps of the run so far."""
        return self.adascale.scale_invariant_steps

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: ClientState | None = None,
        **kwargs: object,
    ) -> object:
        """Saves as DeepSpeed does, with AdaScale's averages and scale-invariant steps in the client state."""
        state = {**(client_state or {}), _STATE: self.adascale.statistics()}
        return super().save_checkpoint(save_dir, tag, state, **kwargs)

    def _restore(self, state: ClientState) -> None:
        """Restores what :meth:`save_checkpoint` has added, without the scale S: a run may go on with other ranks."""
        if _STATE in state:
            self.adascale.load_statistics(state[_STATE])
            set_schedule(self.lr_scheduler, self.progress)

    @errors_in_one_line()
    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Measures the gradients' norms, then steps as DeepSpeed does, with learning rates multiplied by the gains."""
        loss_scale = loss_scale_of(self)
        self.adascale.measure(loss_scale, in_gradients=loss_scale)
        bad = on_any_rank(not tensors.all_finite(tensors.step_gradients(self)), torch.device(self.device))
        if self._skip_step(bad):
            self.adascale.discard_norms()
            return
        with self.adascale.scaled_learning_rate():
            super()._take_model_step(lr_kwargs)
        if self.was_step_applied():
            self.adascale.advance()
        else:
            self.adascale.discard_norms()
        set_schedule(self.lr_scheduler, self.progress)
        self._log()

    def _log(self) -> None:
        """Writes the gain and what it is made of to DeepSpeed's monitor, over samples as its other curves."""
        if self.monitor.enabled:
            whole = self.adascale.gains.whole
            values = {"gain": self.adascale.gain, "noise_scale": whole.noise_scale, "variance": whole.variance}
            values |= {"square_mean": whole.square_mean, "scale_invariant_steps": whole.scale_invariant_steps}
            scalars = [(f"AdaScale/{name}", value, self.global_samples) for name, value in values.items()]
            self.monitor.write_events([each for each in scalars if math.isfinite(each[1])])
