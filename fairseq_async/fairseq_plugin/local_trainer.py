"""fairseq's trainer as a worker of local SGD."""

import logging
import math
import time
from itertools import chain
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq.utils import set_torch_seed

from fairseq_async.fairseq_plugin import local_options
from fairseq_async.fairseq_plugin.local_sgd import replica_of
from fairseq_async.fairseq_plugin.trainer import SEEDS, AppliedUpdates, AsyncTrainer, filled
from fairseq_async.worker.half import Refusals
from fairseq_async.worker.local_sgd import LocalSGD
from fairseq_async.worker.overlap import local_sgd

logger = logging.getLogger(__name__)


class LocalTrainer(AsyncTrainer):
    """Trains with fairseq's own optimizer, and exchanges with the server after its local steps.

    ``num_updates`` is the mean number of local steps of the workers in the run so far: the learning-rate schedule and
    ``--max-update`` mean what they mean in a synchronous run. Worker 0 validates and saves the server's parameters, and
    its own inner optimizer's state, with which every worker of a resumed run begins.
    """

    _local: LocalSGD | None = None

    def _build_optimizer(self) -> None:
        flags = self.session.arguments  # fairseq builds what is called --optimizer there
        flags.optimizer = flags.inner_optimizer
        for name, value in vars(flags).items():
            if name.endswith("_betas") and not isinstance(value, str):
                setattr(flags, name, repr(tuple(value)))  # as on a command line: fairseq takes no tuple here
        try:
            Trainer._build_optimizer(self)
        finally:
            flags.optimizer = "local_sgd"
        if self._local is None:
            replica = replica_of(self._named(), self._optimizer)
            options = local_options.options_of(flags, self.cfg)
            self._local = local_sgd(self.session.client, replica, options)
            self._left_out = Refusals(self.session.place.worker, options.max_refused)
        self._in_step = False
        self._own: Any = None
        self._last: tuple[float, float] | None = None

    @property
    def local(self) -> LocalSGD:
        """This worker's half of the method, which is made with the optimizer."""
        assert self.optimizer is not None  # fairseq builds it when it is first asked for
        assert self._local is not None
        return self._local

    def load_checkpoint(self, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Joins the run and loads what fairseq loads, of which worker 0 brings a new server its state.

        With ``--reset-optimizer``, or for ``--finetune-from-model``, it brings the parameters alone: a new run.
        """
        welcome = self.local.join(self.session.method)
        before = self.optimizer
        extra_state = self._load(welcome["initialised"], filename, reset_optimizer, *args, **kwargs)
        if self.optimizer is before:
            self._build_optimizer()  # the masters of a half-precision model are still those of before
        self.local.replica = replica_of(self._named(), self.optimizer)
        if not welcome["initialised"]:
            welcome = self._bring(None if reset_optimizer else (extra_state or {}).get("async_server"))
        elif extra_state is None and welcome["sequence"]:
            logger.warning("worker %d is back; its inner optimizer begins anew", self.session.place.worker)
        self.local.begin(welcome)
        self.set_num_updates(int(self.local.progress))
        return self._place_in_data(extra_state, welcome["position"])

    def _named(self) -> list[Any]:
        named = chain(self.model.named_parameters(), self.criterion.named_parameters())
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _bring(self, state: Any) -> dict[str, Any]:
        if state is not None and self.cfg.checkpoint.reset_dataloader:
            state["positions"] = {}
            state["plan"]["epochs"] = 0.0
        return self.session.with_file(state, self.local.bring_parameters)

    # One local step

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        self._take_own_back()
        self._started, self._in_step = time.perf_counter(), True
        self._batches = filled(samples)
        try:
            return Trainer.train_step(self, self._batches or samples[:1], raise_oom)
        finally:
            self._in_step = False

    def clip_grad_norm(self, clip_norm: float) -> Any:
        """Of the local gradient, as in a synchronous run of one worker; here a slowed-down worker waits.

        A gradient with NaN or Inf, which would stay in the inner optimizer's moments, is left out of its step.

        Raises:
            RefusedError: the last ``max_refused`` of them had.
        """
        norm = Trainer.clip_grad_norm(self, clip_norm)
        time.sleep((self.session.place.slowdown - 1.0) * (time.perf_counter() - self._started))
        finite = bool(torch.isfinite(norm))
        self._left_out.count(self._left_out.total + (not finite))
        if finite:
            return norm
        self.zero_grad()
        return torch.zeros_like(norm)

    def _set_seed(self) -> None:
        """By this worker's own steps: the run's progress jumps."""
        own = SEEDS * self.session.place.worker
        set_torch_seed(self.cfg.common.seed + own + 7919 * self.local.sequence + self.local.done)

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq calls this after its optimizer's step, which is the end of a local step."""
        if self._local is None or not self._local.joined:
            return Trainer.set_num_updates(self, num_updates)
        if self._in_step:
            self._in_step = False
            self._end_step()
        previous = int(self._num_updates)
        applied = self._at_multiple(max(previous, int(self.local.progress)), previous)
        Trainer.set_num_updates(self, int(applied))
        self._num_updates = applied

    def _end_step(self) -> None:
        self.local.epochs += self._part_of_epoch(self._batches)
        loss, tokens = self._last or (None, 0.0)  # of the step before: fairseq adds them up after this
        self._last = None
        self.local.tokens += tokens
        position = self._iterator.state_dict()
        if self.local.step(time.perf_counter() - self._started, loss, position):
            self._state = None

    def _at_multiple(self, progress: int, previous: int) -> AppliedUpdates:
        """fairseq's loop ends where the number comes to ``max_update``: when the server has all local steps, and no
        sooner, though the schedule of a worker in its last round may be ahead."""
        if self.local.finished:
            self.cfg.optimization.max_update = progress
        elif self.cfg.optimization.max_update:
            progress = max(previous, min(progress, self.cfg.optimization.max_update - 1))
        return AppliedUpdates(progress, previous)

    def _reduce_and_log_stats(self, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            loss = sum(float(output.get("loss", 0.0)) for output in logging_outputs)
            self._last = loss / max(1.0, float(sample_size)) / math.log(2), float(sample_size)
            for name, value in self.local.last.items():
                metrics.log_scalar(name, value, priority=600, round=3)
        return Trainer._reduce_and_log_stats(self, logging_outputs, sample_size, grad_norm)

    # Worker 0 validates and saves the server's parameters, and takes its own back afterwards

    def _fetch(self) -> dict[str, Any]:
        if self._state is None:
            self.local.settle()
            self._own = torch.zeros(self.local.replica.layout.size)
            self.local.replica.read(self._own)
            self._state = self.session.snapshot()
            self.local.replica.write(self._state["server"]["parameters"])
        return self._state

    def _take_own_back(self) -> None:
        self._state = None
        if self._own is not None:
            self.local.replica.write(self._own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        """fairseq's, of the server's parameters and this worker's optimizer, with the server's state beside it."""
        state = self._fetch()
        Trainer.set_num_updates(self, int(self._num_updates))  # of a type that torch loads without trust
        checkpoint: dict[str, Any] = Trainer.state_dict(self)
        checkpoint["cfg"] = self.session.given
        checkpoint["extra_state"]["async_server"] = state
        return checkpoint
