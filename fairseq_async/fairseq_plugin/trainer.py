"""fairseq's trainer as a worker of an asynchronous run."""

import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from fairseq.logging import metrics
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.optim.lr_scheduler import FairseqLRScheduler
from fairseq.trainer import Trainer
from fairseq.utils import set_torch_seed
from omegaconf import OmegaConf

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.optimizer import HybridAsync

logger = logging.getLogger(__name__)

SEEDS = 1_000_000  # between workers: farther apart than fairseq's own additions, epochs and updates


class AppliedUpdates(int):
    """fairseq's ``num_updates`` when others move it too: it may stay where it is, or jump.

    fairseq saves, validates and logs when ``num_updates % interval`` is 0, on the assumption that the number grows
    by one. Here it is 0 exactly when a multiple of the interval was reached or passed since ``previous``.
    """

    previous: int

    def __new__(cls, value: int, previous: int) -> "AppliedUpdates":
        self = super().__new__(cls, value)
        self.previous = previous
        return self

    def __mod__(self, interval: int) -> int:
        if int(self) // interval > self.previous // interval:
            return 0
        return int(self) % interval or interval


def filled(samples: Sequence[Any]) -> list[Any]:
    """Without those that fill up an epoch, for whose sake fairseq counts no token of the others in their step."""
    return [sample for sample in samples if sample is not None and len(sample)]


class RemoteSchedule(FairseqLRScheduler):
    """Stands for the learning-rate schedule, which lives beside the optimizer in the server.

    It follows the applied updates there by itself; worker 0, who validates, tells it of its epochs.
    """

    def _tell(self, event: str, **details: Any) -> None:
        worker = self.optimizer.worker
        if worker.joined and worker.client.worker == 0:
            answer = worker.client.plan(event=event, **details)
            self.optimizer.set_lr(answer["learning_rate"])

    def step_begin_epoch(self, epoch: int) -> None:
        self._tell("begin_epoch", epoch=epoch)

    def step(self, epoch: int, val_loss: Any = None) -> None:
        self._tell("end_epoch", epoch=epoch, loss=None if val_loss is None else float(val_loss))

    def step_update(self, num_updates: int) -> float:
        return float(self.optimizer.get_lr())


class AsyncTrainer(Trainer):
    """Trains on its own gradients with the server's parameters.

    In each epoch the training set is shuffled anew, the same for all, and each worker draws its own k-th part, for k
    workers, as fairseq's synchronous workers do: their epochs together are one pass, and over its epochs each draws
    from the whole set in its own order, at its own pace. ``num_updates`` is the server's version. Worker 0 validates
    and saves.
    """

    def __init__(self, session: Any, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        self.session = session
        self._sharding = False
        self._state: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None
        self._iterator: Any = None
        super().__init__(cfg, task, model, criterion, quantizer)

    # One device, one worker; fairseq asks for the world's size also to divide the data

    @property
    def data_parallel_world_size(self) -> int:
        return self.session.place.workers if self._sharding else 1

    @property
    def data_parallel_rank(self) -> int:
        return self.session.place.worker % self.session.place.workers if self._sharding else 0

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        return self.session.place.worker == 0

    @contextmanager
    def _shards(self) -> Iterator[None]:
        self._sharding = True
        try:
            yield
        finally:
            self._sharding = False

    def get_train_iterator(self, epoch: int, *args: Any, **kwargs: Any) -> Any:
        resumed_at = self._position["epoch"] if self._position else epoch
        first = self._iterator is None
        with self._shards():
            self._iterator = super().get_train_iterator(resumed_at, *args, **kwargs)
            if first and resumed_at > 1 and self._cached().pop(self._train_set(), None) is not None:
                # fairseq makes a cached iterator's batches once, from the number of the epoch in which it makes them:
                # the run that is resumed made them in its first
                self._iterator = super().get_train_iterator(1, load_dataset=False)
        self._check_shares()
        if self._position:
            self._iterator.load_state_dict(self._position)
            self._position = None
        return self._iterator

    def _check_shares(self) -> None:
        batches, workers = getattr(self._iterator, "frozen_batches", None), self.session.place.workers
        if batches is not None and len(batches) < workers and not self.session.method["barrier"]:
            raise ConfigurationError(
                f"the training set has {len(batches)} batches for {workers} workers, which each need one: "
                "lower --max-tokens or --batch-size, or give fewer --workers"
            )

    def _cached(self) -> dict[Any, Any]:
        return self.task.dataset_to_epoch_iter

    def _train_set(self) -> Any:
        return self.task.dataset(self.cfg.dataset.train_subset)

    # Optimizer

    def _build_optimizer(self) -> None:
        if (
            getattr(self, "_optimizer", None) is not None
        ):  # fairseq builds it anew for a checkpoint; this one has joined the run already
            return
        named = chain(self.model.named_parameters(), self.criterion.named_parameters())
        arguments, common = self.session.arguments, self.cfg.common
        self._optimizer = HybridAsync(
            arguments,
            [(name, parameter) for name, parameter in named if parameter.requires_grad],
            self.session.client,
            _loss_scaler(self.cfg) if common.fp16 else None,
            arguments.max_refused,
            arguments.barrier,
        )
        self._lr_scheduler = RemoteSchedule(None, self._optimizer)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        """Joins the run and loads what fairseq loads, of which worker 0 brings a new server its state.

        A worker that comes back goes on where it was in its data.
        """
        checkpoint = self.cfg.checkpoint
        welcome = self.optimizer.worker.join(self.session.method)
        extra_state = self._load(welcome["initialised"], filename, *args, **kwargs)
        if not welcome["initialised"]:
            self.optimizer.forget(schedule=checkpoint.reset_lr_scheduler, positions=checkpoint.reset_dataloader)
            welcome = self.session.with_file(self.optimizer.restored, self.optimizer.worker.bring_parameters)
        self.optimizer.begin(welcome)
        self.set_num_updates(self.optimizer.worker.version)
        return self._place_in_data(extra_state, welcome["position"])

    def _place_in_data(self, extra_state: Any, position: dict[str, Any] | None) -> Any:
        """A worker that comes back goes on where it was, whatever checkpoint or flags say of the run's beginning."""
        self._position = position
        if extra_state is not None:
            extra_state["train_iterator"] = position or extra_state["train_iterator"]
            self.lr_step(extra_state["train_iterator"]["epoch"])
        return extra_state

    def _load(self, running: bool, filename: str, *args: Any, **kwargs: Any) -> Any:
        """Into a run that is going on, parameters come from the server, and worker 0 may be writing this file now."""
        try:
            return super().load_checkpoint(filename, *args, **kwargs)
        except Exception as error:
            if running:
                logger.warning("%s is not read: %s", filename, error)
                return None
            if isinstance(error, AssertionError):
                raise ConfigurationError(f"{filename}: {error}") from error
            raise

    # One step

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        if self._state is not None:  # others went on while this worker validated and saved
            self._state = None
            self.optimizer.worker.pull()
        real = filled(samples)
        self.optimizer.report = {"position": self._iterator.state_dict(), "epochs": self._part_of_epoch(real)}
        self._started = time.perf_counter()
        return super().train_step(real or samples[:1], raise_oom)

    def _part_of_epoch(self, batches: Sequence[Any]) -> float:
        whole = getattr(self._iterator, "frozen_batches", None)
        return len(batches) / len(whole) if whole else 0.0

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> Any:
        prepared, dummy = super()._prepare_sample(sample, is_dummy)
        self.optimizer.idle = dummy
        return prepared, dummy

    def clip_grad_norm(self, clip_norm: float) -> Any:
        """The last thing before the push: here a slowed-down worker waits, so that its gradient gets old."""
        norm = super().clip_grad_norm(clip_norm)
        computed = time.perf_counter() - self._started - self.optimizer.worker.waited
        time.sleep((self.session.place.slowdown - 1.0) * computed)
        return norm

    def _set_seed(self) -> None:
        """By this worker's own updates, since the version may stay the same for several batches; the workers of a
        synchronous run take the same dropout masks, as fairseq's do."""
        own = 0 if self.session.method["synchronous"] else SEEDS * self.session.place.worker
        set_torch_seed(self.cfg.common.seed + own + self.optimizer.worker.sequence)

    def set_num_updates(self, num_updates: int) -> None:
        """Whatever fairseq has counted, after joining it is the server's version that counts."""
        if not self.optimizer.worker.joined:
            return super().set_num_updates(num_updates)
        applied = self._applied_updates()
        super().set_num_updates(int(applied))
        self._num_updates = applied

    def _applied_updates(self) -> AppliedUpdates:
        version, previous = self.optimizer.worker.version, int(self._num_updates)
        if self.optimizer.worker.finished:
            self.cfg.optimization.max_update = version  # fairseq's loop ends at this number
            return AppliedUpdates(version, previous)
        interval = self.cfg.checkpoint.save_interval_updates
        multiple = version - version % interval if interval > 0 else 0
        return AppliedUpdates(multiple if multiple > previous else version, previous)

    def _reduce_and_log_stats(self, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            last = self.optimizer.worker.last
            metrics.log_scalar("staleness", last["staleness"], priority=600, round=2)
            for name in ("push", "pull"):
                metrics.log_scalar(f"{name}_ms", 1000 * last[f"{name}_seconds"], priority=610, round=2)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    # Worker 0 validates and saves the server's parameters

    def begin_valid_epoch(self, epoch: int) -> None:
        self._fetch()
        super().begin_valid_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """fairseq's, with the server's whole state as the optimizer's, in types that torch loads without trust."""
        state = self._fetch()
        self._num_updates = self.optimizer.worker.version
        checkpoint: dict[str, Any] = super().state_dict()
        checkpoint["cfg"] = self.session.given
        if "last_optimizer_state" in checkpoint:
            checkpoint["last_optimizer_state"] |= state
        return checkpoint

    def _fetch(self) -> dict[str, Any]:
        """Once between two steps: what was validated is what is saved."""
        if self._state is None:
            self._state = self.session.snapshot()
            self.optimizer.take(self._state)
        return self._state


def plain(cfg: Any) -> Any:
    """A configuration in dictionaries and lists; fairseq's own Namespaces would need torch's trust to be loaded."""
    container = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(container, dict)
    return {key: vars(value) if isinstance(value, Namespace) else value for key, value in container.items()}


def _loss_scaler(cfg: Any) -> DynamicLossScaler:
    common = cfg.common
    return DynamicLossScaler(
        init_scale=common.fp16_init_scale,
        scale_window=common.fp16_scale_window or int(2**14 / cfg.optimization.update_freq[0]),
        tolerance=common.fp16_scale_tolerance,
        threshold=common.threshold_loss_scale,
        min_loss_scale=common.min_loss_scale,
    )
