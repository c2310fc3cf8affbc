"""DeepSpeed's engine for the synchronous methods, whose ranks are one group without a server."""

import logging
import math
import os
import socket
from collections.abc import Sized
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from fairseq_async.collective.adascale import AdaScale
from fairseq_async.collective.adasum import DistributedAdasum, check_dense
from fairseq_async.collective.agreement import check_equal
from fairseq_async.collective.hierarchy import NodeAdasum
from fairseq_async.collective.rank_states import RankStates
from fairseq_async.deepspeed_plugin import gradients
from fairseq_async.deepspeed_plugin.config import without_file
from fairseq_async.deepspeed_plugin.data import ShardedLoader
from fairseq_async.deepspeed_plugin.engine import check_scheduler, follow
from fairseq_async.deepspeed_plugin.leftovers import unlink_buffer
from fairseq_async.deepspeed_plugin.masters import replica_of
from fairseq_async.errors import AsyncError, ConfigurationError, fail
from fairseq_async.worker.config import AdaScaleOptions, AdasumOptions
from fairseq_async.worker.place import Place

logger = logging.getLogger(__name__)

_SKIPPED_IN_A_ROW = 10


def initialize_group(
    options: AdasumOptions | AdaScaleOptions,
    args: Any,
    model: Any,
    data: Any,
    collate: Any,
    config: dict[str, Any],
    theirs: dict[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, and the engine it has made as one of ours."""
    _as_launched()
    deepspeed.init_distributed()
    unlink_buffer()
    if isinstance(options, AdasumOptions):
        if dist.get_world_size() == 1:
            raise ConfigurationError("adasum combines the gradients of several ranks, and this run has one")
        theirs = theirs | {"mpu": Alone()}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=without_file(args), model=model, collate_fn=collate, config=config, **theirs
    )
    engine.__class__ = AdasumEngine if isinstance(options, AdasumOptions) else AdaScaleEngine
    engine.enter(options)
    loader = None
    if data is not None:
        if not isinstance(data, Sized) or len(data) == 0:
            raise ConfigurationError("training_data must be a data set with a length above 0")
        batch, micro_batches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        samples: Any = data
        ranks, sizes, at = (dist.get_rank(), dist.get_world_size()), [len(data)], Position(engine)
        loader = ShardedLoader(samples, sizes, batch, micro_batches, *ranks, options.seed, collate, lambda: at)
    return engine, optimizer, loader, scheduler


class Position:
    """Where the ranks are in the data set, which is one shard: as :class:`ShardedLoader` asks a worker."""

    def __init__(self, engine: "GroupEngine") -> None:
        self._engine = engine
        self.sequence = self.offset = 0
        self.shard: int | None = 0

    @property
    def done(self) -> int:
        return self._engine.global_steps

    @property
    def finished(self) -> bool:
        return self._engine.finished


class Alone:
    """What DeepSpeed calls a model-parallel unit: it tells every rank that it has no other in its data-parallel group,
    so DeepSpeed reduces nothing, and every rank has whole optimizer states."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][self._rank]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    get_model_parallel_group = get_data_parallel_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return [self._rank]

    def get_data_parallel_rank(self) -> int:
        return 0

    get_model_parallel_rank = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        return 1

    get_model_parallel_world_size = get_data_parallel_world_size


class GroupEngine(DeepSpeedEngine):
    """An engine that was made by ``deepspeed.initialize``.

    A step whose gradient has NaN or Inf on one rank is skipped by all.

    Attributes:
        worker: this rank; rank 0 is to validate.
        place: the same, as asynchronous workers have it.
        progress: steps of the run so far.
        finished: whether they are ``total_steps``.
    """

    options: AdasumOptions | AdaScaleOptions

    def enter(self, options: Any) -> None:
        """Becomes a member of the group.

        Raises:
            ConfigurationError: the configuration does not go with the method, or the ranks differ.
        """
        self.options, self.worker, self._bad_in_a_row = options, dist.get_rank(), 0
        self.place = Place(self.worker, dist.get_world_size())
        if hasattr(self.optimizer, "check_grad_overflow"):
            self.optimizer.check_grad_overflow = True  # ZeRO looks for NaN by itself, with bf16 only if it is told to
        self._check_equal()

    @property
    def progress(self) -> float:
        return self.global_steps - self.skipped_steps

    @property
    def finished(self) -> bool:
        return self.options.total_steps > 0 and self.progress >= self.options.total_steps

    def pull(self) -> None:
        """All ranks have the same parameters already."""

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        self._calling(self._check_equal)
        return loaded

    def _check_equal(self) -> None:
        check_equal([(name, each) for name, each in self.module.named_parameters() if each.requires_grad])

    def _skips(self, bad: bool) -> bool:
        """Whether this step is not to be taken, after all ranks have found the same.

        Raises:
            AsyncError: that was so in the last ten steps.
        """
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        if bad:
            logger.warning("the gradient has NaN or Inf: all ranks skip this step")
        if self._bad_in_a_row >= _SKIPPED_IN_A_ROW and not self.fp16_enabled():
            raise AsyncError(f"the gradients of the last {self._bad_in_a_row} steps had NaN or Inf; try a lower lr")
        if not bad or gradients.has_own_check(self.optimizer):
            return False
        self.zero_grad()
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_applied = False
        return True

    def _calling(self, call: Any, *arguments: Any) -> Any:
        """A mistake of the user's ends the process with one line, not with a traceback."""
        try:
            return call(*arguments)
        except AsyncError as error:
            fail(error)


class AdasumEngine(GroupEngine):
    """Combines gradients, or what each rank's own step has done, by Adasum.

    Every rank is alone to DeepSpeed: with ZeRO 1 and 2 there is nothing to divide, since every rank steps by itself.
    """

    options: AdasumOptions

    def enter(self, options: AdasumOptions) -> None:
        super().enter(options)
        name = type(self.basic_optimizer).__name__
        self.form = options.form_for(f"the optimizer {name}", adaptive="sgd" not in name.lower())
        device = torch.device(self.device)
        self._combine = NodeAdasum(device=device) if options.hierarchy == "node" else DistributedAdasum()
        self._replica = replica_of(self, rank=0)
        self._states = RankStates(self.basic_optimizer)

    def save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, of every rank (ranks but 0 in a directory of their own), since optimizer states may differ."""
        tag = f"global_step{self.global_steps}" if tag is None else tag
        return super().save_checkpoint(self._own(save_dir), tag, *args, **kwargs)

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A rank without a checkpoint of its own begins with rank 0's optimizer state."""
        own = self._own(load_dir)
        if tag is None:
            tag = self._calling(_latest, load_dir)
        return super().load_checkpoint(own if (Path(own) / str(tag)).is_dir() else load_dir, tag, *args, **kwargs)

    def _own(self, directory: str) -> str:
        return directory if self.worker == 0 else str(Path(directory) / f"worker-{self.worker}")

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """In place of DeepSpeed's, at the end of the micro-batches."""
        own = gradients.of(self)
        self._calling(check_dense, own)
        if self.form == "gradient":
            self._combine(own)
            bad = not _finite(own)
        else:
            bad = _on_any_rank(not _finite(own), own[0].device)
            if bad:
                own[0].fill_(math.nan)  # for DeepSpeed's own check, which then skips on all ranks
        if self._calling(self._skips, bad):
            return
        if self.form == "gradient" or bad:
            super()._take_model_step(lr_kwargs)
            return
        start = torch.zeros(self._replica.layout.size, device=own[0].device)
        self._replica.read(start)
        super()._take_model_step(lr_kwargs)
        moved = start.clone()
        self._replica.subtract(moved)
        self._combine([view.view(-1) for view in self._replica.layout.views(moved)])
        if self.options.clip_delta:
            moved.mul_((self.options.clip_delta / moved.norm()).clamp(max=1.0))
        self._replica.write(start.sub_(moved))
        if self.options.sync_state and self.global_steps % self.options.sync_state == 0:
            self._states.average(None)


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
        bad = _on_any_rank(not _finite(gradients.of(self)), torch.device(self.device))
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
            whole = self.adascale.whole
            values = {"gain": whole.gain, "noise_scale": whole.noise_scale, "variance": whole.variance}
            values |= {"square_mean": whole.square_mean, "scale_invariant_steps": whole.scale_invariant_steps}
            scalars = [(f"AdaScale/{name}", value, self.global_samples) for name, value in values.items()]
            self.monitor.write_events([each for each in scalars if math.isfinite(each[1])])


_STATE = "fairseq_async.adascale"


def _as_launched() -> None:
    """A process that no launcher has started is alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if "RANK" not in os.environ:
        os.environ.update({name: str(value) for name, value in alone.items()})


def _latest(directory: str) -> str:
    path = Path(directory) / "latest"
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; there is no checkpoint to go on with") from error


def _finite(tensors: list[Tensor]) -> bool:
    norms = torch._foreach_norm(tensors, torch.inf)
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def _on_any_rank(flag: bool, device: torch.device) -> bool:
    number = torch.tensor([float(flag)], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)
