"""DeepSpeed's engine for the synchronous methods, whose ranks are one data-parallel group without a server."""

import logging
import os

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.collective.agreement import check_equal
from fairseq_async.deepspeed_plugin.compat import (
    check_overflow_always,
    count_step,
    lower_loss_scale,
    may_overflow,
    refresh_masters,
    refuse_other_steps,
)
from fairseq_async.deepspeed_plugin.engines import tensors
from fairseq_async.deepspeed_plugin.engines.engine import ClientState
from fairseq_async.environment import WORKER
from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import AdaScaleOptions, AdasumOptions
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import errors_in_one_line

logger = logging.getLogger(__name__)

_MAX_SKIPPED_IN_A_ROW = 10


class SynchronousEngine(DeepSpeedEngine):
    """A DeepSpeed engine that is one rank of a group; the base class of the engines of Adasum and AdaScale.

    ``deepspeed.initialize`` makes the engine; its class is changed afterwards, and ``set_up`` of the subclass stands
    for the constructor, which never runs. A step whose gradient has NaN or Inf on one rank is skipped by all.

    Attributes:
        worker: this rank; rank 0 is to validate.
        workers: the number of ranks, of which each is to draw its own part of the data.
        context: rank and number of ranks, in the form that asynchronous workers have.
    """

    options: AdasumOptions | AdaScaleOptions
    worker: int
    workers: int
    context: WorkerContext

    def set_up_group(self, options: AdasumOptions | AdaScaleOptions) -> None:
        """Sets the attributes of this class; all ranks call it.

        Raises:
            ConfigurationError: the ranks' parameters differ.
        """
        self.options, self.worker, self._skipped_in_a_row = options, dist.get_rank(), 0
        self.workers = dist.get_world_size()
        self.context = WorkerContext(self.worker, self.workers)
        self._takes_step = False  # whether the engine itself is in a step of its optimizer
        refuse_other_steps(self, self.workers, lambda engine: engine._takes_step or engine.finished)
        check_overflow_always(self.optimizer)
        self._check_equal()

    @property
    def progress(self) -> float:
        """Steps of the run so far, without those that were skipped."""
        return self.global_steps - self.skipped_steps

    @property
    def finished(self) -> bool:
        """Whether the run has had its ``total_steps``."""
        return self.options.total_steps > 0 and self.progress >= self.options.total_steps

    def pull(self) -> None:
        """Does nothing: all ranks have the same parameters already."""

    @errors_in_one_line()
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: object = True,
        load_module_only: object = False,
        *args: object,
        **kwargs: object,
    ) -> tuple[str | None, ClientState]:
        """Loads as DeepSpeed does, then checks that all ranks have the same parameters.

        With ``load_module_only`` a new run begins.
        """
        loaded: tuple[str | None, ClientState] = super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            *args,
            **kwargs,
        )
        if not load_optimizer_states:
            refresh_masters(self)
        self._check_equal()
        if loaded[0] is not None and not load_module_only:
            self._restore(loaded[1])
        return loaded

    def _restore(self, state: ClientState) -> None:
        """Restores what the method has added to a checkpoint's client state; here nothing."""

    def _check_equal(self) -> None:
        check_equal(list(self.module.named_parameters()))  # frozen ones too, which no step makes equal

    def _take_model_step(self, lr_kwargs: dict[str, object] | None) -> None:
        """Steps as DeepSpeed does."""
        self._takes_step = True
        super()._take_model_step(lr_kwargs)
        self._takes_step = False

    def _skip_step(self, bad: bool) -> bool:
        """Returns whether to leave out this step, and counts a step that is. All ranks must give the same ``bad``.

        An optimizer that itself skips steps with NaN or Inf is left to do so.

        Args:
            bad: whether the gradient has NaN or Inf on some rank.

        Raises:
            AsyncError: the gradients of the last ten steps had NaN or Inf, and no loss scale is to fall.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if bad else 0
        if bad:
            logger.warning("the gradient has NaN or Inf: all ranks skip this step")
        if self._skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW and not may_overflow(self):
            raise AsyncError(f"the gradients of the last {self._skipped_in_a_row} steps had NaN or Inf; try a lower lr")
        if not bad or tensors.skips_nonfinite_steps(self.optimizer):
            return False
        lower_loss_scale(self)
        self.zero_grad()
        self.skipped_steps += 1
        count_step(self, applied=False)
        return True


class GroupPosition:
    """The group's position in the data set, which is one shard, as a ``DataPosition`` of :class:`ShardedLoader`."""

    def __init__(self, engine: SynchronousEngine) -> None:
        self._engine = engine
        self.sequence = self.offset = 0
        self.shard: int | None = 0
        self.first_micro_batch, self.micro_batches = None, 0

    @property
    def done(self) -> int:
        """Steps of the group so far, skipped ones among them."""
        return int(self._engine.global_steps)

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._engine.finished


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Returns whether a flag is set on at least one rank; a collective call, which all ranks must make."""
    number = torch.tensor([float(flag)], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def set_environment_without_launcher() -> None:
    """Sets torch.distributed's variables for a process that no launcher has started: a group of one rank.

    Raises:
        ConfigurationError: our own launcher has started the process; it makes no group of a script's processes.
    """
    if WORKER in os.environ:
        raise ConfigurationError(
            "a method without a server: fairseq-async launch would train each worker alone; start the ranks with "
            "deepspeed or torchrun"
        )
    if "RANK" not in os.environ:
        world = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in world.items()})
