"""Local SGD round an ordinary optimizer."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fairseq_async.method.global_server import local_sgd_server
from fairseq_async.method.option_checks import check_ranks
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.pytorch.copies import Copies, MovingReplica
from fairseq_async.pytorch.fsdp import divided_replica
from fairseq_async.pytorch.options import parse_options
from fairseq_async.pytorch.parameters import drop_gradients, is_skipped_by_scaler, l2_norm, step_gradients
from fairseq_async.pytorch.schedules import Given, OwnRates, ProgressSchedule, one_for_each
from fairseq_async.pytorch.training import AsyncTraining
from fairseq_async.worker.buffers import exchanged_buffers, with_buffers
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import local_sgd_worker
from fairseq_async.worker.replica import TensorReplica
from fairseq_async.worker.start.process import errors_in_one_line

_REMEDY = (
    "give it as scheduler=, with lengths in steps, which follows the run's progress, and leave scheduler.step() out of "
    "the loop, or set it by worker.progress"
)


class AsyncLocalSGD(AsyncTraining):
    """Asynchronous local SGD (Liu et al. 2024, arXiv 2401.09135), DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    The optimizer, any of torch's, steps on this worker. After ``local_steps`` of its steps the worker sends
    θ_start − θ to the server, whose outer rule applies it, and goes on from the server's parameters. The optimizer's
    state stays this worker's own.

    With several optimizers, a local step is complete when each of them has stepped at least once since the last one: a
    discriminator may step five times for each step of its generator.

    Steps that were left out, by a ``GradScaler`` or for NaN, are no local steps. A worker that is killed loses the
    local steps since its last exchange.

    Example::

        with AsyncLocalSGD(model, optimizer, outer="diloco", local_steps=50, total_steps=1000) as worker:
            while not worker.finished:
                optimizer.zero_grad()
                loss(model, batch()).backward()
                optimizer.step()

    Args:
        model: the model, or several, for which names in messages begin with the model's number.
        optimizer: any of torch's, or several, of different parameters.
        scheduler: the optimizer's scheduler, any whose rates are a function of the number of its steps. The run steps
            it, by its progress: mean local steps of a worker. Of several optimizers a list, with None for those without
            one. Needs ``total_steps``.
        options: those of ``local_sgd`` and of the server, see docs/pytorch.md.
    """

    @errors_in_one_line()
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Given = None,
        **options: Any,
    ) -> None:
        server, self.options = parse_options(LocalSGDOptions, options, "AsyncLocalSGD")
        super().__init__(model, optimizer, server)
        check_ranks(self.options, self._context.island_size, "AsyncLocalSGD")
        exchanged_buffers(self._model, self.options)  # a mistake is to show before anything starts
        self.server_module = local_sgd_server(self.options.upstream)
        self._local: LocalSGDWorker | None = None
        self._of_optimizer = {id(each): _own(self._named, each) for each in self.optimizers}
        self._schedules = {
            id(each): ProgressSchedule(each, its, self.options.total_steps)
            for each, its in zip(self.optimizers, one_for_each(self.optimizers, scheduler), strict=True)
            if its is not None
        }
        self._copies = Copies(self.optimizers, self._context.island_size, self._named[0][1].device)
        self._own_rates = {id(each): OwnRates(each, _REMEDY) for each in self.optimizers}
        self._called = set[int]()  # the optimizers whose step came since the last local step was complete
        self._counts = False  # whether one of these steps counts

    @property
    def async_worker(self) -> LocalSGDWorker:
        return self._inside(self._local)

    @property
    def progress(self) -> float:
        """Mean local steps of a worker in the run so far, as the server had them at this worker's last exchange."""
        for rates in self._own_rates.values():
            rates.asked = True
        return self.async_worker.total_progress

    def describe(self, workers: int) -> MethodSpec:
        return local_sgd_spec(self.options, workers, [], self._server_options, {})

    def _make_worker(self, client: ServerConnection) -> LocalSGDWorker:
        is_writer = self._context.rank == 0
        replica = divided_replica(self._model, self._named) or TensorReplica(self._named, is_writer)
        whole = with_buffers(replica, self._model, self.options, is_writer)
        self._local = local_sgd_worker(client, MovingReplica(whole, self._copies), self.options)
        return self._local

    def _add_hooks(self) -> list[RemovableHandle]:
        for schedule in self._schedules.values():
            schedule.join(self.async_worker.run_progress)
        self._follow()
        before = [each.register_step_pre_hook(self._before_step) for each in self.optimizers]
        return before + [each.register_step_post_hook(self._after_step) for each in self.optimizers]

    def _prepare_step(self, optimizer: Optimizer) -> None:
        """Finds out whether the coming step counts as a local step.

        Gradients with NaN or Inf are dropped, since the NaN or Inf would stay in the optimizer's state.
        """
        self._check_schedule(optimizer)
        named = self._of_optimizer[id(optimizer)]
        gradients = step_gradients(named)
        if self.finished:
            self._leave_out_after_end()
        elif gradients and not is_skipped_by_scaler(optimizer):
            finite = l2_norm(gradients) < float("inf")
            self.loop.count_left_out(not finite)
            self._counts = self._counts or finite
            if not finite:
                drop_gradients(named)

    @errors_in_one_line()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._copies.note()
        self._called.add(id(optimizer))
        if len(self._called) == len(self.optimizers):
            self._called.clear()
            if self._counts:
                self._counts = False
                self.async_worker.step(self.loop.slowed_down(), self._take_loss())
                self._follow()
        self.loop.begin_step()

    def _follow(self) -> None:
        for schedule in self._schedules.values():
            schedule.follow(self.async_worker.run_progress)

    def _check_schedule(self, optimizer: Optimizer) -> None:
        if schedule := self._schedules.get(id(optimizer)):
            schedule.check()
        elif self.workers > 1 and self.options.total_steps and not self.of_trainer:
            self._own_rates[id(optimizer)].check(self.async_worker.total_progress)


def _own(named: list[tuple[str, Parameter]], optimizer: Optimizer) -> list[tuple[str, Parameter]]:
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return [(name, parameter) for name, parameter in named if id(parameter) in stepped]
