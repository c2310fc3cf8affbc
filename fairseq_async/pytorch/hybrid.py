"""Hybrid asynchronous SGD round an ordinary optimizer, whose steps are taken in the server."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject, MethodSpec, hybrid_spec
from fairseq_async.options.config import HybridOptions
from fairseq_async.pytorch.brought_state import (
    StateInServer,
    brought_state,
    check_brought,
    checksum_of_moments,
    note_end_of_run,
    warn_of_missing_moments,
    warn_of_run_before,
)
from fairseq_async.pytorch.fsdp import divided_replica
from fairseq_async.pytorch.micro_batches import BackwardPasses
from fairseq_async.pytorch.options import parse_options
from fairseq_async.pytorch.parameters import drop_gradients, is_skipped_by_scaler, l2_norm, step_gradients
from fairseq_async.pytorch.schedules import one_for_each
from fairseq_async.pytorch.training import AsyncTraining
from fairseq_async.server.optimizers.learning_rates import (
    StepCount,
    begin_anew,
    check_options,
    check_rates,
    check_scheduled,
    check_table,
    present_options,
    present_rates,
    steps_taken,
    tabulate,
)
from fairseq_async.server.optimizers.torch_optimizer import PARTS, describe
from fairseq_async.server.programs import gradient_main
from fairseq_async.worker.connection.server_connection import ServerConnection
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.start.process import errors_in_one_line
from fairseq_async.worker.start.server_process import say


class HybridAsync(AsyncTraining):
    """Hybrid asynchronous SGD (Aji & Heafield 2019, arXiv 1906.03496).

    ``optimizer.step()`` sends the gradients to the server and takes its parameters if they have changed. Within the
    step itself the gradients are None, so that it changes nothing; afterwards they are as before. The server steps an
    optimizer of the same class, with the same parameter groups, by the mean of several gradients. When a worker is
    killed, its gradient is on its way or lost, but never half applied.

    Example::

        with HybridAsync(model, optimizer, scheduler=scheduler, total_steps=1000) as worker:
            while not worker.finished:
                optimizer.zero_grad()
                loss(model, batch()).backward()
                optimizer.step()

    A model in bf16 is rounded from the server's parameters, which are in fp32: small steps are not lost.

    With several optimizers, the step of each sends the gradients of its own parameters alone, and the server steps the
    same optimizer by the mean of such gradients, with its own step count and schedule: a generator and a discriminator
    train as in a plain loop, and so do two optimizers that step after one ``backward``. ``progress`` and
    ``total_steps`` are the steps of the optimizer with the fewest.

    Args:
        model: the model, or several, for which names in messages begin with the model's number.
        optimizer: one of ``torch.optim`` that the server has, or of a user's plugin, see docs/pytorch.md; or several
            of these, of different parameters. Their state stays empty here: the server has it. An optimizer that has
            stepped before brings its moments and step counts to a new server; of several workers those of worker 0, as
            with the parameters.
        scheduler: the optimizer's scheduler, any whose rates are a function of the number of its steps. The server
            takes the rates, by its own steps; what the scheduler does to this worker's optimizer is of no effect. Of
            several optimizers a list, with None for those without one.
        clip_norm: largest L2 norm of the mean gradient that the server steps with, of each optimizer by itself; 0 does
            not clip.
        micro_batches: one of the options: how many batches a step has of each worker, on average. At 2 or more, divide
            each loss by ``worker.micro_batches``, and call ``optimizer.step()`` when ``worker.step_is_due``.
        options: those of ``hybrid_async`` and of the server, see docs/pytorch.md.
    """

    server_module = "fairseq_async.server.programs.gradient_main"
    types = (torch.float32, torch.bfloat16)

    @errors_in_one_line()
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | Sequence[LRScheduler | None] | None = None,
        clip_norm: float = 0.0,
        **options: Any,
    ) -> None:
        server, self.options = parse_options(HybridOptions, options, "HybridAsync")
        super().__init__(model, optimizer, server)
        optimizers = self.optimizers
        if not (isinstance(clip_norm, int | float) and 0 <= clip_norm < inf):
            raise ConfigurationError(f"HybridAsync: clip_norm is {clip_norm!r}: it must be a number of at least 0")
        schedulers = one_for_each(optimizers, scheduler)
        steps = self.options.total_steps
        self._parts = [
            _OptimizerPart(each, its, self._named, steps, float(clip_norm))
            for each, its in zip(optimizers, schedulers, strict=True)
        ]
        if len(self._parts) > 1:
            self._check_several()
        self._check_rates()
        self._passes = BackwardPasses() if self.options.micro_batches > 1 else None
        self._hybrid: HybridWorker | None = None
        self._ended: list[_OptimizerPart] = []  # the optimizers with a step after the end of the run

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

    @property
    def micro_batches(self) -> int:
        """How many batches this worker's next gradient is to be the mean of; it changes with ``optimizer.step()``."""
        return self.async_worker.micro_batches or self.options.micro_batches

    @property
    def batch_numbers(self) -> range:
        """The numbers of this worker's next batches, for a script whose workers know all batches in the same order.

        The server deals them, so that all workers together train each number once, whatever their speeds. The ranks of
        one worker have the same numbers, and each takes its part of every batch.
        """
        worker, number = self.async_worker, self.micro_batches
        first = worker.first_micro_batch
        if first is None:  # all workers have the same number in each step
            first = number * (worker.sequence * self.workers + worker.shard)
        return range(first, first + number)

    @property
    def step_is_due(self) -> bool:
        """Whether ``backward`` was called for all micro-batches of the step."""
        return self._passes is None or self._passes.count >= self.micro_batches

    def describe(self, workers: int) -> MethodSpec:
        steps, inner = self.options.total_steps, [part.inner.to_json() for part in self._parts]
        described: JsonObject = inner[0] if len(inner) == 1 else {PARTS: [*inner]}
        spec = hybrid_spec(self.options, workers, self._server_options, described, steps)
        if self._restored is None:
            check_brought(spec, self.optimizers)
        # a version of several is the step of one: it neither is a step of the run nor says where the next one leads
        several = replace(spec, last_version=None, whole_steps=steps, look_ahead=0.0)
        return spec if len(inner) == 1 else several

    @errors_in_one_line()
    def load_state_dict(self, state: State) -> None:
        """See :meth:`AsyncTraining.load_state_dict`; the state has the position of the schedule, too."""
        super().load_state_dict(state)
        if state:
            for part in self._parts:
                part.count_in_server()

    def _state_brought(self, spec: MethodSpec) -> State | None:
        """Returns the moments of optimizers that have stepped before, as a server's state."""
        return brought_state(spec, self._named, self.optimizers, gradient_main.build)

    def _make_worker(self, client: ServerConnection) -> HybridWorker:
        is_writer = self._context.rank == 0
        self._hybrid = HybridWorker(
            client, self._named, is_writer=is_writer, divided=divided_replica(self._model, self._named)
        )
        if self._restored is None:
            self._hybrid.details.moments = checksum_of_moments(self._named, self.optimizers)
            for optimizer in self.optimizers:
                warn_of_run_before(optimizer)
        return self._hybrid

    def _add_hooks(self) -> list[RemovableHandle]:
        is_saved = self.of_trainer  # not by self: the optimizer keeps its hook, and would keep this run with it
        for part in self._parts:
            part.optimizer.state = part.state
            warn_of_missing_moments(part.optimizer, "worker.state_dict(), too", lambda: is_saved)
        before = [part.optimizer.register_step_pre_hook(self._before_step) for part in self._parts]
        if self._passes is not None:
            before += self._passes.add_hooks(self._named)
        after = [part.optimizer.register_step_post_hook(part.give_back) for part in self._parts]
        for part, handle in zip(self._parts, after, strict=True):  # the script's own are to find the gradients
            cast(OrderedDict[int, Any], part.optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)
        return before + after

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        for part in self._parts:
            if part.optimizer.state is part.state:
                part.optimizer.state = defaultdict(dict)
                note_end_of_run(part.optimizer)

    def _prepare_step(self, optimizer: Optimizer) -> None:
        """Exchanges with the server in place of the optimizer's step, which then finds no gradients."""
        if next(reversed(optimizer._optimizer_step_pre_hooks.values())) != self._before_step:
            raise ConfigurationError(
                "a hook before optimizer.step() was registered within the block, and would find no gradients: they are "
                "sent before it; register it before the run begins"
            )
        (part,) = (part for part in self._parts if part.optimizer is optimizer)
        if not is_skipped_by_scaler(optimizer):
            part.before_step(self.of_trainer)
        if self.finished:
            if len(self._parts) > 1 and part not in self._ended:  # the run may end between the steps of a turn
                self._ended.append(part)
                return drop_gradients(part.named)
            return self._leave_out_after_end()
        gradients = step_gradients(part.named)
        if self._passes is not None and gradients:
            self._passes.check(self.micro_batches)
        if gradients and not is_skipped_by_scaler(optimizer):
            if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a fused optimizer would divide by it
                for gradient in gradients:
                    gradient.div_(scale)
            self.loop.slowed_down()
            with part.alone():
                self.async_worker.write_ahead()  # while the norm is measured
                self._push(l2_norm(gradients))
        part.take_gradients()
        self.loop.begin_step()

    def _push(self, norm: float) -> None:
        loss = self._take_loss()
        samples = float(self.micro_batches * self._context.island_size)
        self.async_worker.step(samples, None if loss is None else float(loss), norm)

    def _check_rates(self) -> None:
        for part in self._parts:
            part.check_rates()

    def _check_several(self) -> None:
        """Checks that the options go with several optimizers.

        Raises:
            ConfigurationError: one does not.
        """
        server, options = self._server_options, self.options
        several, updates = f"with {len(self._parts)} optimizers", options.updates_per_step or 1
        if server.server_shards != "1":
            raise ConfigurationError(f"server_shards= does not go {several}: leave it out")
        if updates > 1 and not options.barrier:
            raise ConfigurationError(
                f"updates_per_step is {updates}: {several}, give 1 or barrier=True, or leave it out"
            )
        if options.look_ahead:
            raise ConfigurationError(f"look_ahead is {options.look_ahead}: {several}, leave it out")
        if options.micro_batches > 1:
            raise ConfigurationError(f"micro_batches is {options.micro_batches}: {several}, leave it out")


class _OptimizerPart:
    """One optimizer of the run, with its scheduler.

    Args:
        named: all parameters that are exchanged.
        steps: number of steps of the run.

    Attributes:
        named: the optimizer's own parameters.
        inner: its description for the server.
        state: the optimizer's within the block.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        named: list[tuple[str, Parameter]],
        steps: int,
        clip_norm: float,
    ) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.optimizer = optimizer
        self.named = [(name, parameter) for name, parameter in named if id(parameter) in own]
        self._others = [parameter for _, parameter in named if id(parameter) not in own]
        rates = [] if scheduler is None else tabulate(scheduler, optimizer, steps)
        self.inner = describe(optimizer, named, rates=rates, clip_norm=clip_norm)
        self._steps = steps
        self._rates, self._options = present_rates(optimizer), present_options(optimizer)
        self._scheduler = scheduler
        self.state = StateInServer(dict)
        self._taken: list[tuple[Parameter, Tensor | None]] = []
        self._began = steps_taken(scheduler)  # before the first row of the table
        self._count = None if scheduler is None else StepCount(scheduler, steps)

    def count_in_server(self) -> None:
        """Takes the rates from the schedule's beginning: the server is given a state that has the position.

        Raises:
            ConfigurationError: the scheduler has taken steps, and its rates before are not known.
        """
        if self._scheduler is not None:
            if not steps_taken(self._scheduler):
                begin_anew(self._scheduler)
            rates = tabulate(self._scheduler, self.optimizer, self._steps, counted=True)
            self.inner, self._began = replace(self.inner, learning_rates=rates), 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, no parameter of another optimizer has a gradient."""
        gradients = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self._others, gradients, strict=True):
                parameter.grad = gradient

    def take_gradients(self) -> None:
        """Takes the optimizer's gradients away, until :meth:`give_back`.

        ``zero_grad(set_to_none=False)`` is to find them: a parameter that the next loss does not use then has zeros,
        which count as they do in a plain loop.
        """
        self._taken = [(parameter, parameter.grad) for _, parameter in self.named]
        drop_gradients(self.named)

    def give_back(self, *of_the_hook: object) -> None:
        """Gives the gradients back after the optimizer's step."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient
        self._taken = []

    def before_step(self, of_trainer: bool) -> None:
        """Checks what :meth:`check_rates` does, that the optimizer's state is as it was, and that the loop steps the
        scheduler as often as the optimizer; a ``Trainer`` does not step it, and looks itself."""
        self.state.check(self.optimizer)
        if self._count is not None:
            if not of_trainer:
                self._check_count(self._count)
            if not self._count.ended:
                check_table(self._scheduler, self._began, self.inner.learning_rates)
        self.check_rates()

    def _check_count(self, count: StepCount) -> None:
        count.before_step()
        if count.early:
            say(
                f"warning: {type(self._scheduler).__name__} was stepped before the first optimizer.step(): the server "
                "steps at the rates that it has without that; step it after optimizer.step()"
            )

    def check_rates(self) -> None:
        """Checks that nothing but a scheduler that the server knows sets the learning rates, or other options.

        Raises:
            ConfigurationError: something else sets them.
        """
        check_options(self.optimizer, self._options)
        if self._scheduler is not None:
            check_scheduled(self.optimizer, self._scheduler)
        else:
            check_rates(self.optimizer, self._rates, "give a scheduler of torch as scheduler=")
