"""fairseq's trainers as the plug-in makes them, of the contract's task, in this process, with a server in a thread."""

import copy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_async.environment import SERVER, TOKEN, WORKER, WORKERS
from fairseq_async.fairseq_plugin import server as hybrid
from fairseq_async.fairseq_plugin.registry import METHODS, AsynchronousMethod
from fairseq_async.fairseq_plugin.session import WorkerSession
from fairseq_async.server.programs import local_sgd_main
from scripts.faults.thread_server import ThreadServer
from tests.helpers.contract import fairseq_train
from tests.helpers.contract.net import Case, Net, Run

HYBRID = "--optimizer hybrid_async --updates-per-step 1"
LOCAL = "--optimizer local_sgd --outer sgd --outer-lr 1.0 --local-steps 3"


@cache
def configuration(flags: str) -> Any:
    """fairseq's, which takes most of a second to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fairseq-train", "DATA", *fairseq_train.COMMON, *flags.split()])
        return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser()))


class Trainers:
    """Workers of one run; ``made`` has them all. Each has its net as ``trainer.model.net``."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder, self.run_dir = patch, folder, folder / "run"
        self.made: list[Any] = []
        self.server: ThreadServer | None = None

    def make(
        self, flags: str, worker: int = 0, workers: int = 1, spoilt: tuple[int, ...] = (), **checkpoint: object
    ) -> Any:
        """A trainer that has not joined its run. Batches of the numbers in ``spoilt`` have NaN; ``checkpoint`` has
        options of fairseq's checkpoints."""
        net = Net(Run(Case(spoilt=spoilt), "run", self.run_dir, worker))
        fairseq_train._net[:] = [net]
        cfg = copy.deepcopy(configuration(flags))
        cfg.common.tpu = False  # which fairseq sets with bf16
        for name, value in ({"save_dir": self.run_dir} | checkpoint).items():
            setattr(cfg.checkpoint, name, str(value) if isinstance(value, Path) else value)
        task = tasks.setup_task(cfg.task)
        parts = cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        method = METHODS[cfg.optimizer.optimizer]
        if not isinstance(method, AsynchronousMethod):
            method.check(cfg)
            self.made.append(method.trainer(*parts))
            return self.made[-1]
        if self.server is None:
            build = local_sgd_main.build if "local_sgd" in flags else hybrid.build
            self.server = ThreadServer(workers, self.run_dir, build=build)
        given = {SERVER: self.server.address, TOKEN: self.server.token, WORKER: worker, WORKERS: workers}
        for name, value in given.items():
            self.patch.setenv(name, str(value))
        self.made.append(method.trainer(WorkerSession(method, cfg), *parts))
        return self.made[-1]

    def join(self, *given: Any, **more: Any) -> Any:
        """A trainer that has joined its run, from a checkpoint where there is one, at the beginning of an epoch."""
        trainer = self.make(*given, **more)
        _, epoch = checkpoint_utils.load_checkpoint(trainer.cfg.checkpoint, trainer)
        trainer.batches = epoch.next_epoch_itr()
        return trainer

    def next_run(self) -> None:
        """Ends this run; the next workers are those of another, in another directory."""
        self.end()
        self.made, self.server, self.run_dir = [], None, self.run_dir.with_suffix(".next")

    def end(self) -> None:
        for trainer in self.made:
            if hasattr(trainer, "session"):
                trainer.session.client.leave(finished=False)
        if self.server is not None:
            self.server.stop()


def step(trainer: Any, count: int = 1, batches: int = 1) -> None:
    """So many steps of an epoch, each of so many batches."""
    for _ in range(count):
        trainer.train_step([next(trainer.batches) for _ in range(batches)])


def saved_updates(trainer: Any, path: Path) -> Any:
    """The number of updates in the checkpoint that the trainer has saved."""
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1, "iterations_in_epoch": 1}})
    return torch.load(path, weights_only=True)["optimizer_history"][-1]["num_updates"]
