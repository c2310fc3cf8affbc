"""fairseq's workers in a replay: real trainers, which a recorded run tells when to compute and from what."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq import tasks, utils
from fairseq.data import iterators
from torch import Tensor

import fairseq_async.fairseq_plugin  # noqa: F401  registers the optimizers
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import rule
from fairseq_async.fairseq_plugin.command_line import read_command
from fairseq_async.fairseq_plugin.local_trainer import LocalTrainer
from fairseq_async.fairseq_plugin.session import DOORS
from fairseq_async.server import Layout
from fairseq_async.worker import outer
from fairseq_async.worker.half import Half
from fairseq_async.worker.place import Place

Event = dict[str, Any]


class RecordedClient:
    """Stands for the connection: answers from the events what the server had answered, and keeps what is pushed.

    Args:
        events: this worker's, those to come.
    """

    def __init__(self, worker: int, events: Sequence[Event]) -> None:
        self.worker, self.events = worker, list(events)
        self.parameters, self.version = torch.empty(0), 0
        self.slot = torch.empty(0)
        self.pushed: dict[str, Any] | None = None

    def join(self, layout: Layout, method: dict[str, Any]) -> dict[str, Any]:
        self.layout, self.slot = layout, torch.zeros(layout.size)
        first = self.events[0]
        return {"initialised": True, "sequence": first["sequence"], "refused": 0, **self._answer(first)}

    def pull(self, copy: Callable[[Tensor], object]) -> int:
        """As where nothing is published: the parameters come in the slot, and stay there. Not while an update is there
        that has not been taken: then the worker is told later what to start from."""
        if self.pushed is None:
            self.slot.copy_(self.parameters)
            copy(self.slot)
        return self.version

    def prepare(self, write: Callable[[Tensor], object]) -> float:
        write(self.slot)
        return 0.0

    def push(self, write: Callable[[Tensor], object], **message: Any) -> dict[str, Any]:
        write(self.slot)
        self.pushed = message
        self.events.pop(0)
        nothing = {"staleness": 0, "refused": 0, "norm": 0.0, "cosine": 0.0, "status": "applied"}
        return nothing | {"version": message["base_version"], **self._answer(self.events[0] if self.events else {})}

    def plan(self, **message: Any) -> dict[str, Any]:
        """Of its epochs worker 0 tells a rule that has heard of them from the record."""
        return {"learning_rate": 0.0}

    @staticmethod
    def _answer(then: Event) -> dict[str, Any]:
        """What the worker did next is what it was told to do."""
        place = {"local_steps": 1 << 30, "shard": None, "offset": 0, "progress": 0.0, "pace": 1.0}
        told = {name: then.get(name, otherwise) for name, otherwise in place.items()}
        return {"learning_rate": 0.0, "finished": False, "total_progress": 0.0, **told}


@dataclass
class ReplayedSession:
    """What a trainer asks of its session."""

    arguments: Any
    place: Place
    method: dict[str, Any]
    client: RecordedClient
    given: dict[str, Any] = field(default_factory=dict)


class ReplayedWorker:
    """One worker of the run; ``events`` are its own."""

    def __init__(self, cfg: Any, method: dict[str, Any], place: Place, events: Sequence[Event]) -> None:
        cfg = deepcopy(cfg)
        if method["max_epoch"]:
            cfg.optimization.max_epoch = 0  # as in the run: the server counts the passes
        self.client = RecordedClient(place.worker, events)
        session = ReplayedSession(cfg.optimizer, place, method, self.client)
        utils.set_torch_seed(cfg.common.seed)
        self.task: Any = tasks.setup_task(cfg.task)
        model, criterion = self.task.build_model(cfg.model), self.task.build_criterion(cfg.criterion)
        trainer: Any = DOORS[cfg.optimizer.optimizer].trainer
        self.trainer: Any = trainer(session, cfg, self.task, model, criterion)
        self.cfg = cfg
        optimizer = self.trainer.optimizer
        self._half: Half = self.trainer.local if isinstance(self.trainer, LocalTrainer) else optimizer.worker
        self._batches = self._draw()

    @property
    def layout(self) -> Layout:
        return self._half.replica.layout

    def take(self, parameters: Tensor, version: int) -> None:
        """Starts from these parameters."""
        self.client.parameters, self.client.version, self.client.pushed = parameters, version, None
        if self._half.joined:
            self._half.pull()
        else:
            self._half.begin(self._half.join({}))
        self.trainer.set_num_updates(0)

    def compute(self) -> tuple[dict[str, Any], Tensor]:
        """Trains until there is something to push: its message, and the gradient or pseudo-gradient."""
        self.client.pushed = None
        while self.client.pushed is None:
            self.trainer.train_step(next(self._batches))
        return self.client.pushed, self.client.slot

    def _draw(self) -> Iterator[Any]:
        """Batches as ``fairseq_cli.train`` draws them, epoch after epoch."""
        cfg, epochs = self.cfg, self.trainer.get_train_iterator(epoch=1)
        while True:
            shuffle = epochs.next_epoch_idx > cfg.dataset.curriculum
            fixed = cfg.distributed_training.fix_batches_to_gpus
            batches = epochs.next_epoch_itr(fix_batches_to_gpus=fixed, shuffle=shuffle)
            frequencies = cfg.optimization.update_freq
            frequency = frequencies[min(epochs.epoch, len(frequencies)) - 1]
            self.trainer.begin_epoch(epochs.epoch)
            yield from iterators.GroupedIterator(
                batches, frequency, skip_remainder_batch=cfg.optimization.skip_remainder_batch
            )
            self.trainer.lr_step(epochs.epoch, None)
            sharded = self.task.has_sharded_data("train")
            epochs = self.trainer.get_train_iterator(epochs.next_epoch_idx, load_dataset=sharded)


class FairseqRun:
    """A recorded run of fairseq workers: its rule, its workers, and the threads with which they computed.

    Raises:
        ConfigurationError: the recorded command is missing, or is not of this method.
    """

    def __init__(self, run_dir: Path, description: dict[str, Any], events: Sequence[Event]) -> None:
        self.cfg, command = read_command(run_dir)
        self.threads: int = command["threads"]
        self.method, workers = description["method"], description["workers"]
        _check(run_dir, self.cfg, self.method)
        own = {w: [event for event in events if event["worker"] == w] for w in {event["worker"] for event in events}}
        self.workers = {w: ReplayedWorker(self.cfg, self.method, Place(w, workers), own[w]) for w in sorted(own)}

    def build(self, layout: Layout, parameters: Tensor) -> tuple[Any, Any]:
        """Rule and plan, as the server of the run had them."""
        build: Any = rule.build if self.method["method"] == "hybrid_async" else outer.build
        return build(self.method, layout, parameters)


def _check(run_dir: Path, cfg: Any, method: dict[str, Any]) -> None:
    if getattr(cfg.optimizer, "optimizer", None) != method["method"]:
        raise ConfigurationError(f"{run_dir}: command.json and run.json are of two runs")
    if cfg.common.fp16 or cfg.common.bf16 or not (cfg.common.cpu or not torch.cuda.is_available()):
        raise ConfigurationError(f"{run_dir}: only runs in fp32 on a CPU can be repeated bit for bit")
    if method.get("overlap"):
        raise ConfigurationError(f"{run_dir}: a run with --overlap depends on when answers came; it cannot be repeated")
    if method["method"] == "local_sgd" and cfg.lr_scheduler._name == "reduce_lr_on_plateau":
        raise ConfigurationError(f"{run_dir}: reduce_lr_on_plateau follows validations, which a replay omits")
