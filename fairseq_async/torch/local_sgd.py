"""Local SGD round an ordinary optimizer."""

import time
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fairseq_async.config import LocalSGDOptions
from fairseq_async.global_server import local_sgd_server
from fairseq_async.method_spec import MethodSpec, local_sgd_spec
from fairseq_async.torch.options import parse_options
from fairseq_async.torch.parameters import drop_gradients, is_skipped_by_scaler, l2_norm, step_gradients
from fairseq_async.torch.training import AsyncTraining
from fairseq_async.worker.async_worker import left_out_steps
from fairseq_async.worker.client import Client
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.local_sgd_workers import local_sgd_worker
from fairseq_async.worker.process import errors_in_one_line
from fairseq_async.worker.replica import TensorReplica


class AsyncLocalSGD(AsyncTraining):
    """Asynchronous local SGD (Liu et al. 2024, arXiv 2401.09135), DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    The optimizer, any of torch's, steps on this worker. After ``local_steps`` of its steps the worker sends
    θ_start − θ to the server, whose outer rule applies it, and goes on from the server's parameters. The optimizer's
    state and its schedulers stay this worker's own.

    Steps that were left out, by a ``GradScaler`` or for NaN, are no local steps. A worker that is killed loses the
    local steps since its last exchange.

    Example::

        with AsyncLocalSGD(model, optimizer, outer="diloco", local_steps=50, total_steps=1000) as worker:
            while not worker.finished:
                optimizer.zero_grad()
                loss(model, batch()).backward()
                optimizer.step()

    Args:
        options: those of ``local_sgd`` and of the server, see docs/pytorch.md.
    """

    @errors_in_one_line()
    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        server, self.options = parse_options(LocalSGDOptions, options, "AsyncLocalSGD")
        super().__init__(model, optimizer, server)
        self.server_module = local_sgd_server(self.options.upstream)
        self._local: LocalSGDWorker | None = None
        self._counts = False

    @property
    def async_worker(self) -> LocalSGDWorker:
        return self._inside(self._local)

    @property
    def progress(self) -> float:
        """Mean local steps of a worker in the run so far, as the server had them at this worker's last exchange."""
        return self.async_worker.total_progress

    def describe(self, workers: int) -> MethodSpec:
        return local_sgd_spec(self.options, workers, [], self._server_options, {})

    def _make_worker(self, client: Client) -> LocalSGDWorker:
        self._local = local_sgd_worker(client, TensorReplica(self._named), self.options)
        self._left_out = left_out_steps(client.worker, self.options.max_refused)
        return self._local

    def _add_hooks(self) -> list[RemovableHandle]:
        before = self.optimizer.register_step_pre_hook(self._before_step)
        return [before, self.optimizer.register_step_post_hook(self._after_step)]

    @errors_in_one_line()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds out whether the coming step counts as a local step.

        Gradients with NaN or Inf are dropped, since the NaN or Inf would stay in the optimizer's state.
        """
        self._check_step(args, kwargs)
        gradients = step_gradients(self._named)
        self._counts = bool(gradients) and not self.finished and not is_skipped_by_scaler(optimizer)
        if self.finished:
            self._leave_out_after_end()
        elif self._counts:
            finite = l2_norm(gradients) < float("inf")
            self._left_out.count(self._left_out.total + (not finite))
            if not finite:
                drop_gradients(self._named)
                self._counts = False

    @errors_in_one_line()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counts:
            self.async_worker.step(self._sleep_if_slowed_down(), self._take_loss())
        self._step_ended = time.perf_counter()
