"""Hybrid asynchronous SGD round an ordinary optimizer, whose steps are taken in the server."""

import time
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from fairseq_async.config import HybridOptions
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import MethodSpec, hybrid_spec
from fairseq_async.server.optimizers.learning_rates import (
    CountLimit,
    check_options,
    check_rates,
    check_scheduled,
    present_options,
    present_rates,
    tabulate,
)
from fairseq_async.server.optimizers.torch_optimizer import describe
from fairseq_async.torch.options import parse_options
from fairseq_async.torch.parameters import drop_gradients, is_skipped_by_scaler, l2_norm, step_gradients
from fairseq_async.torch.training import AsyncTraining
from fairseq_async.worker.client import Client
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.process import errors_in_one_line


class HybridAsync(AsyncTraining):
    """Hybrid asynchronous SGD (Aji & Heafield 2019, arXiv 1906.03496).

    ``optimizer.step()`` sends the gradients to the server and takes its parameters if they have changed; then the
    gradients are None, so that the step itself changes nothing. The server steps an optimizer of the same class, with
    the same parameter groups, by the mean of several gradients. When a worker is killed, its gradient is on its way or
    lost, but never half applied.

    Example::

        with HybridAsync(model, optimizer, scheduler=scheduler, total_steps=1000) as worker:
            while not worker.finished:
                optimizer.zero_grad()
                loss(model, batch()).backward()
                optimizer.step()

    Args:
        optimizer: Adam, AdamW or SGD of ``torch.optim``. Its state stays empty here: the server has it.
        scheduler: the optimizer's scheduler, any whose rates are a function of the number of its steps. The server
            takes the rates, by its own steps; what the scheduler does to this worker's optimizer is of no effect.
        clip_norm: largest L2 norm of the mean gradient that the server steps with; 0 does not clip.
        options: those of ``hybrid_async`` and of the server, see docs/pytorch.md.
    """

    server_module = "fairseq_async.server.gradient_main"

    @errors_in_one_line()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        clip_norm: float = 0.0,
        **options: Any,
    ) -> None:
        server, self.options = parse_options(HybridOptions, options, "HybridAsync")
        super().__init__(model, optimizer, server)
        if not (isinstance(clip_norm, int | float) and 0 <= clip_norm < inf):
            raise ConfigurationError(f"HybridAsync: clip_norm is {clip_norm!r}: it must be a number of at least 0")
        if not (scheduler is None or isinstance(scheduler, LRScheduler)):
            raise ConfigurationError(f"scheduler is {scheduler!r}: it must be one of torch.optim.lr_scheduler")
        rates = [] if scheduler is None else tabulate(scheduler, optimizer, self.options.total_steps)
        self._inner = describe(optimizer, self._named, rates=rates, clip_norm=float(clip_norm))
        self._rates, self._options = present_rates(optimizer), present_options(optimizer)
        self._scheduler = scheduler
        self._limit = None if scheduler is None else CountLimit(scheduler, self.options.total_steps)
        self._check_rates()
        self._hybrid: HybridWorker | None = None

    @property
    def async_worker(self) -> HybridWorker:
        return self._inside(self._hybrid)

    @property
    def progress(self) -> float:
        """Steps of the server so far, as this worker last heard; partial ones are added up."""
        return self.async_worker.progress

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group in the server's next step."""
        return self.async_worker.learning_rate

    def describe(self, workers: int) -> MethodSpec:
        framework, steps = self._inner.to_json(), self.options.total_steps
        return hybrid_spec(self.options, workers, self._server_options, framework, steps)

    def _make_worker(self, client: Client) -> HybridWorker:
        self._hybrid = HybridWorker(client, self._named, self.options.max_refused)
        return self._hybrid

    def _add_hooks(self) -> list[RemovableHandle]:
        return [self.optimizer.register_step_pre_hook(self._exchange)]

    @errors_in_one_line()
    def _exchange(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Exchanges with the server in place of the optimizer's step, which then finds no gradients."""
        self._check_step(args, kwargs)
        self._check_rates()
        if self.finished:
            return self._leave_out_after_end()
        gradients = step_gradients(self._named)
        if gradients and not is_skipped_by_scaler(optimizer):
            if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused optimizer would divide by it
                for gradient in gradients:
                    gradient.div_(scale)
            self._sleep_if_slowed_down()
            self.async_worker.write_ahead()  # while the norm is measured
            self._push(l2_norm(gradients))
        drop_gradients(self._named)
        self._step_ended = time.perf_counter()

    def _push(self, norm: float) -> None:
        """Pushes the gradients; with NaN or Inf, waits for the receipt, which says how many in a row were refused."""
        loss = self._take_loss()
        self.async_worker.step(1.0, None if loss is None else float(loss), wait=not norm < inf, norm=norm)

    def _check_rates(self) -> None:
        """Checks that nothing but a scheduler that the server knows sets the learning rates, or other options.

        Raises:
            ConfigurationError: something else sets them.
        """
        check_options(self.optimizer, self._options)
        if self._limit is not None and self._scheduler is not None:
            self._limit.hold()
            check_scheduled(self.optimizer, self._scheduler)
        else:
            check_rates(self.optimizer, self._rates, "give a scheduler of torch as scheduler=")
