"""One worker's part in a run, from fairseq's ``main`` to its end."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fairseq import checkpoint_utils

from fairseq_async.errors import AsyncError, fail
from fairseq_async.fairseq_plugin import local_options, options
from fairseq_async.fairseq_plugin.command_line import write_command
from fairseq_async.fairseq_plugin.local_trainer import LocalTrainer
from fairseq_async.fairseq_plugin.trainer import AsyncTrainer, plain
from fairseq_async.worker.place import SERVERS, Place


def attach(modules: Mapping[str, ModuleType]) -> None:
    """Puts this worker between ``fairseq-train``'s command line and its ``main``.

    fairseq looks both names up when it calls them, so that nothing of it has to be copied or changed: ``main`` is
    wrapped and ``Trainer`` is replaced in the module of the command that is running, and only there.
    """
    for name in ("__main__", "fairseq_cli.train"):
        module = modules.get(name)
        if module is not None and hasattr(module, "Trainer") and not isinstance(module.main, partial):
            module.main = partial(_main, module, module.main)  # type: ignore[attr-defined]


def _main(module: ModuleType, main: Callable[..., None], cfg: Any, **kwargs: Any) -> None:
    try:
        session = Session(cfg)
        module.Trainer = partial(session.door.trainer, session)  # type: ignore[attr-defined]
        try:
            main(cfg, **kwargs)
            session.end()
        finally:
            session.close()
    except AsyncError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("fairseq-async: interrupted\n")
        raise SystemExit(130) from None


@dataclass(frozen=True)
class Door:
    """What belongs to one ``--optimizer``."""

    trainer: type[AsyncTrainer]
    describe: Callable[[Namespace, Any, int], dict[str, Any]]
    server: str


DOORS = {
    "hybrid_async": Door(AsyncTrainer, options.describe, SERVERS["hybrid_async"]),
    "local_sgd": Door(LocalTrainer, local_options.describe, SERVERS["local_sgd"]),
}


class Session:
    """Connects to the server before fairseq loads anything, so that a mistake shows at once.

    Attributes:
        arguments: every flag of the command line, as fairseq hands them to an old-style optimizer.
        given: the configuration as it was given, in plain types, for checkpoints.
        method: what all workers must agree upon.
    """

    def __init__(self, cfg: Any) -> None:
        self.arguments: Namespace = cfg.optimizer
        self.given = plain(cfg)
        self.door = DOORS[self.arguments.optimizer]
        self.run_dir = Path(self.arguments.run_dir or cfg.checkpoint.save_dir)
        place = Place.find()
        if not place.joins:  # it does not know the number of workers yet
            self.door.describe(self.arguments, cfg, place.workers)  # a mistake is to show before anything starts
        given = options.run_options(self.arguments)
        self.place, self.client, self._server = place.connect(
            self.door.server, given.server, given.token_file, self.run_dir, given.server_timeout, on_loss=_die
        )
        self.method = self.door.describe(self.arguments, cfg, self.place.workers)
        self._adjust(cfg)
        if self.method["record"] and self.place.worker == 0:
            write_command(self.run_dir)

    def snapshot(self) -> dict[str, Any]:
        """The server's whole state."""
        path = self.run_dir / f".state-{self.place.worker}.pt"
        try:
            self.client.ask({"kind": "snapshot", "path": str(path.resolve())})
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        finally:
            path.unlink(missing_ok=True)
        return state

    def with_file(self, state: dict[str, Any] | None, bring: Callable[[str | None], dict[str, Any]]) -> dict[str, Any]:
        """Calls ``bring`` with a file that holds the state, for as long as that takes; with None for no state."""
        if state is None:
            return bring(None)
        path = self.run_dir / ".state-restored.pt"
        try:
            torch.save(state, path)
            return bring(str(path.resolve()))
        finally:
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """fairseq has come to its end. That of worker 0 is everybody's: it sees the limits, and the patience."""
        self.client.leave(finished=self.place.worker == 0)
        if self._server is not None:
            self._server.wait(seconds=60)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()

    def _adjust(self, cfg: Any) -> None:
        worker = self.place.worker
        if torch.cuda.is_available() and not cfg.common.cpu:
            torch.cuda.set_device(self.place.local_rank % torch.cuda.device_count())
        if self.method["max_epoch"]:
            cfg.optimization.max_epoch = 0  # the server counts the passes of all workers together
        if cfg.common.bf16:
            cfg.common.tpu = self.arguments.tpu = False  # fairseq takes --bf16 for a TPU; CPUs and GPUs have it too
        if worker > 0:
            # each worker is its own master to fairseq, which tries the directory out by a file of one name
            checkpoint_utils.verify_checkpoint_directory = _trust_worker_0
            cfg.dataset.disable_validation = True
            cfg.common.wandb_project = cfg.common.aim_repo = None
            if cfg.common.log_file:
                cfg.common.log_file += f".worker{worker}"
            if cfg.common.tensorboard_logdir:
                cfg.common.tensorboard_logdir += f"/worker{worker}"


def _trust_worker_0(directory: str) -> None:
    """Worker 0 finds out whether checkpoints can be written."""


def _die(reason: str) -> None:
    """Ends a worker that computes for a server that is no more; called from another thread than fairseq's."""
    sys.stderr.write(f"fairseq-async: error: {reason}\n")
    sys.stderr.flush()
    os._exit(2)
