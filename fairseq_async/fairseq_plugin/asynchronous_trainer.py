"""The base of the asynchronous workers' trainers: a worker's part of the data, the server's state in checkpoints."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.batches import batches_of_first_epoch, batches_of_pass, real_batches
from fairseq_async.fairseq_plugin.compat.checkpoints import check_workers, checkpoint_errors, make_plain
from fairseq_async.fairseq_plugin.compat.optimizers import trainable_parameters
from fairseq_async.fairseq_plugin.compat.shutdown import ddp_on_cpu
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.fairseq_plugin.compat.updates import AppliedUpdates
from fairseq_async.fairseq_plugin.session import WorkerSession
from fairseq_async.protocol import Welcome
from fairseq_async.pytorch.parameters import check_exchanged, check_memory
from fairseq_async.worker.async_worker import AsyncWorker

logger = logging.getLogger(__name__)

_PARTS = "parts"  # key of a worker's position
SEED_SPACING = 1_000_000  # between workers' seeds: more than fairseq adds for epochs and updates


class AsynchronousTrainer(Trainer, ABC):
    """fairseq's trainer for one worker of a run whose parameters are the server's.

    In each epoch the training set is shuffled anew, in the same order on all workers. Each of k workers draws its own
    k-th part, as fairseq's synchronous ranks do: one epoch of every worker is one pass over the data. Over its epochs,
    each worker draws from the whole set, in its own order and at its own speed. Worker 0 validates and saves.
    """

    _num_updates: int
    _wrapped_model: FairseqObject

    def __init__(
        self,
        session: WorkerSession,
        cfg: FairseqConfig,
        task: FairseqObject,
        model: FairseqObject,
        criterion: FairseqObject,
        quantizer: FairseqObject = None,
    ) -> None:
        self.session = session
        self.validated_epoch = 0  # the epoch of the last validation
        self._sharding = False
        self._position: StateDict | None = None  # where a worker that comes back goes on in the data
        self._iterator: FairseqObject = None
        self._drawn = 0.0  # batches of this step that are not empty, of all ranks of this worker
        self._in_train_step = False
        super().__init__(cfg, task, model, criterion, quantizer)

    @property
    @abstractmethod
    def worker(self) -> AsyncWorker:
        """The worker side of the method, which is made together with the optimizer."""

    @property
    def model(self) -> FairseqObject:
        """The model, in fairseq's wrapper where the worker has several ranks."""
        distributed = self.cfg.distributed_training
        torchs = distributed.ddp_backend in ("pytorch_ddp", "c10d") and self.device.type == "cpu"
        if self._wrapped_model is None and self.use_distributed_wrapper and torchs:
            self._wrapped_model = ddp_on_cpu(distributed, self._model, self.data_parallel_process_group)
        return super().model

    @abstractmethod
    def fetch_server_state(self) -> StateDict:
        """Fetches the server's state, and puts its parameters into the model.

        Between two steps, the state is fetched only once, so that what was validated is what is saved.
        """

    # fairseq's view of the group: each worker is a world of its own ranks; a world of one makes no collective call. But
    # fairseq also divides the data by the size of the world: while it does so, the world has all workers' ranks.

    @property
    def data_parallel_world_size(self) -> int:
        """The number of all workers' ranks while the data is divided, else of this one's."""
        context = self.session.context
        return context.ranks if self._sharding else context.island_size

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's part while the data is divided, else the rank; who joins shares a part."""
        context = self.session.context
        return context.global_rank if self._sharding else context.rank

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """Whether this is rank 0 of worker 0."""
        return self.session.context.worker == self.session.context.rank == 0

    @contextmanager
    def _sharded_world(self) -> Iterator[None]:
        self._sharding = True
        try:
            yield
        finally:
            self._sharding = False

    # Data

    def get_train_iterator(self, epoch: int, *args: object, **kwargs: object) -> FairseqObject:
        """Returns fairseq's iterator over this worker's part; a worker that comes back goes on where it was."""
        resumed_at = self._position["epoch"] if self._position else epoch
        first = self._iterator is None
        make = super().get_train_iterator
        with self._sharded_world():
            self._iterator = make(resumed_at, *args, **kwargs)
            if first and resumed_at > 1:
                remade = batches_of_first_epoch(self.task, self.cfg, partial(make, 1, load_dataset=False))
                self._iterator = self._iterator if remade is None else remade
        self._check_batches(self.session.context.ranks)
        self._iterator = self._in_order(self._iterator)
        if self._position:
            self._iterator.load_state_dict(self._position)
            self._position = None
        return self._iterator

    def _in_order(self, iterator: FairseqObject) -> FairseqObject:
        """Returns an iterator over the same data in the order of the method."""
        return iterator

    def _check_batches(self, ranks: int) -> None:
        task, max_epoch = self.cfg.task._name, self.session.spec.max_epoch
        if getattr(self._iterator, "num_shards", ranks) != ranks:
            raise ConfigurationError(
                f"--task {task} does not let fairseq divide the training set: all {ranks} workers would train on the "
                "same batches; start one worker, or give another --task"
            )
        whole = batches_of_pass(self._iterator)
        if whole is None and max_epoch:
            raise ConfigurationError(
                f"--max-epoch {max_epoch}: the training set of --task {task} has no known size; give --max-update"
            )
        if whole is not None and whole < ranks and not self.session.spec.full_rounds:
            raise ConfigurationError(
                f"the training set has {whole} batches for {ranks} workers, which each need one: "
                "lower --max-tokens or --batch-size, or start fewer workers"
            )

    def position(self) -> StateDict:
        """Returns where this worker is in its part of the data, for its restart."""
        state: StateDict = self._iterator.state_dict()
        return state if self._parts is None else state | {_PARTS: self._parts}

    @property
    def _parts(self) -> list[int] | None:
        """The first of the worker's parts of the data, how many it has, of how many; None where each worker has one."""
        context = self.session.context
        if context.ranks == context.workers:
            return None
        return [context.global_rank - context.rank, context.island_size, context.ranks]

    def fraction_of_epoch(self) -> float:
        """Returns the fraction of a pass over the whole training set that this step's batches are, those of all ranks;
        0 if its size is not known."""
        whole = batches_of_pass(self._iterator)
        return self._drawn / whole if whole else 0.0

    def train_step(self, samples: Sequence[FairseqObject], raise_oom: bool = False) -> FairseqObject:
        """Takes one step as fairseq does. Tasks and models are given a plain number of updates, whose remainders they
        may take as of any other; after a step that does not count, no interval has ended."""
        updates = self._num_updates = int(self._num_updates)
        real = real_batches(samples)
        self._in_train_step, self._drawn = True, float(len(real))
        try:
            return super().train_step(real or samples[:1], raise_oom)
        finally:
            self._in_train_step = False
            if type(self._num_updates) is int:
                self._num_updates = AppliedUpdates(updates, updates)

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clips as fairseq does, after backward, when every parameter that is trained has a gradient.

        Raises:
            ConfigurationError: a parameter is trained that is not exchanged.
        """
        for module in (self._model, self._criterion):
            check_exchanged(module, self._exchanged, "make it before training begins")
        norm: Tensor = super().clip_grad_norm(clip_norm)
        return norm

    def _aggregate_logging_outputs(
        self, logging_outputs: Sequence[FairseqObject], *sums: FairseqObject, ignore: bool = False
    ) -> tuple[Sequence[FairseqObject], Sequence[FairseqObject]]:
        """Adds up over the ranks of this worker what fairseq does, and in a training step what the method needs."""
        more = self._summed() if len(sums) > 1 else []  # a validation's batch has its size alone
        outputs, found = super()._aggregate_logging_outputs(logging_outputs, *sums, *more, ignore=ignore)
        if more:
            self._take_sums(found[0], *found[len(sums) :])
        return outputs, found[: len(sums)]

    def _summed(self) -> list[FairseqObject]:
        """Returns what is added up over the ranks after a step's last backward pass."""
        return [self._drawn]

    def _take_sums(self, sample_size: FairseqObject, drawn: FairseqObject, *others: FairseqObject) -> None:
        """Takes the sums of :meth:`_summed`, and the step's sample size."""
        self._drawn = float(drawn)

    def _reduce_and_log_stats(
        self, logging_outputs: FairseqObject, sample_size: float, grad_norm: Tensor | None = None
    ) -> FairseqObject:
        """Logs as fairseq does, but nothing of a step of empty batches alone, which a worker of several ranks may have
        at the end of an epoch: many criterions divide by its size, 0. A plain run has a rank with a batch in each step.
        """
        if grad_norm is not None and not self._drawn:
            return None
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    # Checkpoints

    def consolidate_optimizer(self) -> None:
        """Fetches the server's state on all ranks of worker 0, of which one saves it."""
        if self.session.context.island_size > 1 and self.session.context.worker == 0 and not self._in_train_step:
            self.fetch_server_state()
        super().consolidate_optimizer()

    def save_checkpoint(self, filename: str, extra_state: StateDict) -> str | None:
        """Saves as fairseq does; but not crash.pt from amid a step, in which the ranks could not fetch the state
        together."""
        if self._in_train_step and self.session.context.island_size > 1:
            return None
        saved: str | None = super().save_checkpoint(filename, extra_state)
        return saved

    def trainable_parameters(self) -> list[tuple[str, Parameter]]:
        """Returns the parameters that this worker exchanges, with their names.

        Raises:
            ConfigurationError: a parameter has no elements of its own that can be exchanged.
        """
        for module in (self.model, self.criterion):
            check_memory(module)
        named = trainable_parameters(self._model, self._criterion)
        self._exchanged = {id(parameter) for _, parameter in named}
        return named

    def load_fairseq_checkpoint(
        self, welcome: Welcome, filename: str, *args: object, **kwargs: object
    ) -> StateDict | None:
        """Loads a checkpoint as fairseq does; returns its extra state, or None if no checkpoint is read.

        In a run that is going on, parameters come from the server, and worker 0 may be writing this file now: a file
        that cannot be read is ignored with a warning. A worker that comes late to a run that began without a checkpoint
        reads none: the file has worker 0's place in the data, and this worker would leave out what comes before that
        place in its own part.
        """
        running = welcome.initialised
        if running and not welcome.from_checkpoint and not welcome.sequence:
            return None
        with checkpoint_errors(filename):
            try:
                extra_state: StateDict | None = super().load_checkpoint(filename, *args, **kwargs)
            except Exception as error:  # fairseq and torch raise whatever the file's bytes lead them to
                if not running:
                    raise
                logger.warning("%s is not read: %s", filename, error)
                return None
        given = self.cfg.checkpoint
        tunes = filename == given.finetune_from_model  # else it is a checkpoint of the tuning itself
        keeps_positions = not (given.reset_dataloader or tunes or self.session.spec.shards)
        if running and self.session.client.on_any_rank(extra_state is None):
            return None  # not even where this rank could read it
        if extra_state is not None and keeps_positions and not running:
            context = self.session.context
            what = "workers" if context.ranks == context.workers else "ranks in all"
            check_workers(extra_state, context.ranks, filename, what)
        return extra_state

    def state_dict(self) -> StateDict:
        """Returns fairseq's checkpoint with the number of workers, in types that torch.load trusts."""
        return make_plain(super().state_dict(), self.session.given, self.session.context.ranks)

    def resume_data(self, extra_state: StateDict | None, position: StateDict | None) -> StateDict | None:
        """Returns a checkpoint's extra state, with this worker's position in the data.

        A worker that comes back goes on at ``position``, whatever the checkpoint or the flags say of the run's
        beginning.

        Raises:
            ConfigurationError: the position is of a worker whose ranks had other parts of the data.
        """
        if position is not None and position.get(_PARTS) != self._parts:
            if not self.session.context.joins:
                raise ConfigurationError(
                    "this run goes on with workers of other numbers of ranks, which had other parts of the data: give "
                    "--reset-dataloader, or the --ranks-per-worker of before"
                )
            position = None  # of another worker, which had this number before
        self._position = position
        if extra_state is not None:
            extra_state["train_iterator"] = position or extra_state["train_iterator"]
            self.lr_step(extra_state["train_iterator"]["epoch"])
        return extra_state

    def begin_valid_epoch(self, epoch: int) -> None:
        """Puts the server's parameters into the model before the validation, which worker 0 alone does."""
        self.validated_epoch = epoch
        self.fetch_server_state()
        super().begin_valid_epoch(epoch)
