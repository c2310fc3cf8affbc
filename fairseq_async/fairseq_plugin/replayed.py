"""fairseq's workers in a replay: real trainers, to which the record of a run answers in place of a server.

The record says when each worker computed, and from which parameters.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fairseq import tasks, utils
from torch import Tensor

import fairseq_async.fairseq_plugin  # noqa: F401  registers the optimizers
from fairseq_async.algorithms import Rule, in_turn
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import server
from fairseq_async.fairseq_plugin.asynchronous_trainer import AsynchronousTrainer
from fairseq_async.fairseq_plugin.command_line import read_command
from fairseq_async.fairseq_plugin.compat.dealt import grouped
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.fairseq_plugin.flags import cut_batches
from fairseq_async.fairseq_plugin.registry import METHODS
from fairseq_async.fairseq_plugin.session import leave_to_server
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Assignment, Layout, Push, PushReply, ScheduleReply, Status, Welcome
from fairseq_async.records.events import Event
from fairseq_async.server.plan import Plan
from fairseq_async.server.programs import local_sgd_main
from fairseq_async.worker.connection.compressor import Compressor
from fairseq_async.worker.connection.server_connection import JoinDetails
from fairseq_async.worker.start.context import WorkerContext


class RecordedClient:
    """Stands for a worker's connection to its server in a replay: answers from the events as the server answered.

    Args:
        events: this worker's events that are still to come.

    Attributes:
        parameters, version: what the next pull gives.
        slot: the flat vector that is pushed.
        pushed: the message of the last push, until the worker starts again; else None.
        compressor: compresses the updates as in the run, after which the slot has what the server decoded; else None.
    """

    def __init__(self, worker: int, events: Sequence[Event]) -> None:
        self.worker, self.events = worker, list(events)
        self.parameters, self.version = torch.empty(0), 0
        self.slot = torch.empty(0)
        self.pushed: Push | None = None
        self.compressor: Compressor | None = None

    def join(self, layout: Layout, spec: MethodSpec, details: JoinDetails) -> Welcome:
        """Returns the server's welcome, as in a run that is going on."""
        self.layout, self.slot, self._fragments = layout, torch.zeros(layout.size), layout.fragments(spec.fragments)
        codec = spec.compress.push
        self.compressor = None if codec is None else Compressor(codec, spec, layout, self.worker)
        first = self.events[0]
        return Welcome(
            True,
            memory="",
            publishes=False,
            slots=0,
            sequence=first.sequence,
            total_steps=spec.total_steps,
            assignment=_assignment(first),
        )

    def pull(
        self,
        copy: Callable[[Tensor], object],
        look_ahead: float = 0.0,
        starts: bool = False,
        fragment_of: int | None = None,
    ) -> int:
        """Copies the parameters by way of the slot, where they stay, as from a server that publishes nothing.

        While an update lies in the slot, nothing is copied: the replay says later what the worker starts from.
        """
        if self.pushed is None:
            part = slice(None) if fragment_of is None else in_turn(self._fragments, fragment_of).elements
            self.slot[part] = self.parameters[part]
            copy(self.slot)
        return self.version

    def prepare(self, write: Callable[[Tensor], object]) -> None:
        write(self.slot)

    def push(self, write: Callable[[Tensor], object], push: Push) -> PushReply:
        """Keeps the update, and answers as the server did."""
        write(self.slot)
        event = self.events.pop(0)
        self.pushed = push if self.compressor is None else self._compressed(push, self.compressor, event)
        assignment = _assignment(self.events[0]) if self.events else Assignment(learning_rate=0.0, local_steps=_FOREVER)
        status = Status.REFUSED if event.status is Status.REFUSED else Status.APPLIED
        return PushReply(status, push.base_version, staleness=0, refused=0, finished=False, assignment=assignment)

    @property
    def update(self) -> Tensor:
        """The update that was pushed: the slot, or that part of it that is the update's fragment."""
        assert self.pushed is not None
        return in_turn(self._fragments, self.pushed.sequence).of(self.slot)

    def _compressed(self, push: Push, compressor: Compressor, event: Event) -> Push:
        """Encodes and decodes the update in the slot, and tells the compressor whether it was applied."""
        part = in_turn(self._fragments, push.sequence).of(self.slot)
        push, payload = compressor.encode(push, part)
        if payload is not None:
            part.copy_(compressor.decode(payload, part.numel(), push))
        compressor.settle(event.status is Status.APPLIED)
        return push

    def schedule_event(self, event: str, epoch: int, loss: float | None = None) -> ScheduleReply:
        """Ignores worker 0's report of an epoch: the replay gives the schedule its epochs from the record."""
        return ScheduleReply(0.0)


_FOREVER = 1 << 30  # local steps: the record ends before


def _assignment(following: Event) -> Assignment:
    """Returns the server's assignment of the worker's next work, as the following event reports it."""
    return Assignment(
        learning_rate=0.0,
        local_steps=_FOREVER if following.local_steps is None else following.local_steps,
        shard=following.shard,
        offset=following.offset or 0,
        progress=following.progress or 0.0,
        progress_per_step=1.0 if following.progress_per_step is None else following.progress_per_step,
        micro_batches=following.micro_batches or 0,
        first_micro_batch=following.offset if following.micro_batches else None,
    )


@dataclass
class ReplayedSession:
    """The part of a :class:`~fairseq_async.fairseq_plugin.session.WorkerSession` that a trainer uses, for a replay."""

    arguments: Namespace
    context: WorkerContext
    spec: MethodSpec
    client: RecordedClient
    given: StateDict = field(default_factory=dict)
    can_deal: bool = True


class ReplayedWorker:
    """One worker of a recorded run, which computes again what it computed in the run.

    Args:
        events: this worker's own.
    """

    def __init__(self, cfg: FairseqConfig, spec: MethodSpec, context: WorkerContext, events: Sequence[Event]) -> None:
        cfg = deepcopy(cfg)
        leave_to_server(cfg, spec)
        self.client = RecordedClient(context.worker, events)
        session = ReplayedSession(cfg.optimizer, context, spec, self.client)
        utils.set_torch_seed(cfg.common.seed)
        self.task: FairseqObject = tasks.setup_task(cfg.task)
        model, criterion = self.task.build_model(cfg.model), self.task.build_criterion(cfg.criterion)
        trainer = METHODS[cfg.optimizer.optimizer].trainer
        self.trainer: AsynchronousTrainer = trainer(session, cfg, self.task, model, criterion)
        self.cfg = cfg
        self._worker = self.trainer.worker
        self._batches = self._draw()

    @property
    def layout(self) -> Layout:
        """The layout of the worker's parameters."""
        return self._worker.replica.layout

    def start_from(self, parameters: Tensor, version: int) -> None:
        """Starts from these parameters."""
        self.client.parameters, self.client.version, self.client.pushed = parameters, version, None
        if self._worker.joined:
            self._worker.start_again()
        else:
            self._worker.begin(self._worker.join(self.trainer.session.spec))
        self.trainer.set_num_updates(0)

    def compute(self) -> tuple[Push, Tensor]:
        """Trains until the worker pushes; returns the message, and the gradient or pseudo-gradient."""
        self.client.pushed = None
        while self.client.pushed is None:
            self.trainer.train_step(next(self._batches))
            self._worker.settle()  # an update may be pushed from another thread
        return self.client.pushed, self.client.update

    def _draw(self) -> Iterator[Sequence[FairseqObject]]:
        """Yields batches as ``fairseq_cli.train`` draws them, epoch after epoch."""
        cfg, epochs = self.cfg, self.trainer.get_train_iterator(epoch=1)
        while True:
            shuffle = epochs.next_epoch_idx > cfg.dataset.curriculum
            fixed = cfg.distributed_training.fix_batches_to_gpus
            batches = epochs.next_epoch_itr(fix_batches_to_gpus=fixed, shuffle=shuffle)
            frequencies = cfg.optimization.update_freq
            frequency = frequencies[min(epochs.epoch, len(frequencies)) - 1]
            self.trainer.begin_epoch(epochs.epoch)
            yield from grouped(batches, frequency, cfg.optimization.skip_remainder_batch)
            self.trainer.lr_step(epochs.epoch, None)
            sharded = self.task.has_sharded_data("train")
            epochs = self.trainer.get_train_iterator(epochs.next_epoch_idx, load_dataset=sharded)


class FairseqRun:
    """A recorded run of fairseq workers: its rule, its workers, and the threads with which they computed.

    Raises:
        ConfigurationError: the recorded command is missing, or is not of this method.
    """

    def __init__(self, run_dir: Path, spec: MethodSpec, events: Sequence[Event]) -> None:
        self.cfg, self.threads = read_command(run_dir)
        self.spec = spec
        _check(run_dir, self.cfg, spec)
        cut_batches(self.cfg.optimizer, self.cfg)
        own = {w: [event for event in events if event.worker == w] for w in {event.worker for event in events}}
        self.workers = {w: ReplayedWorker(self.cfg, spec, WorkerContext(w, spec.workers), own[w]) for w in sorted(own)}

    def build(self, spec: MethodSpec, layout: Layout, parameters: Tensor) -> tuple[Rule, Plan]:
        """Builds the rule and the plan, as the server of the run had them."""
        if spec.method == "hybrid_async":
            return server.build(spec, layout, parameters)
        return local_sgd_main.build(spec, layout, parameters)


def _check(run_dir: Path, cfg: FairseqConfig, spec: MethodSpec) -> None:
    if getattr(cfg.optimizer, "optimizer", None) != spec.method:
        raise ConfigurationError(f"{run_dir}: command.json and run.json are of two runs")
    if cfg.common.fp16 or cfg.common.bf16 or not (cfg.common.cpu or not torch.cuda.is_available()):
        raise ConfigurationError(f"{run_dir}: only runs in fp32 on a CPU can be repeated bit for bit")
    if spec.options.get("overlap"):
        raise ConfigurationError(f"{run_dir}: a run with --overlap depends on when answers came; it cannot be repeated")
    if spec.method == "local_sgd" and cfg.lr_scheduler._name == "reduce_lr_on_plateau":
        raise ConfigurationError(f"{run_dir}: reduce_lr_on_plateau follows validations, which a replay omits")
