"""A training session: what surrounds fairseq's ``main``, from the command line to the end of the process."""

import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from fairseq.trainer import Trainer

from fairseq_async.errors import AsyncError, ConfigurationError, fail
from fairseq_async.fairseq_plugin import flags
from fairseq_async.fairseq_plugin.command_line import write_command
from fairseq_async.fairseq_plugin.compat.checkpoints import (
    leave_directory_check_to_worker_0,
    load_on_every_rank,
    plain_config,
)
from fairseq_async.fairseq_plugin.compat.dealt import with_dealt
from fairseq_async.fairseq_plugin.compat.precision import convert_without_tpu
from fairseq_async.fairseq_plugin.compat.shutdown import leave_process_group
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.fairseq_plugin.registry import METHODS, AsynchronousMethod, Method, SynchronousMethod
from fairseq_async.fairseq_plugin.validations import note_validation
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.notices import ENDED
from fairseq_async.worker.server_state import fetch_state
from fairseq_async.worker.start.context import WorkerContext
from fairseq_async.worker.start.process import last_word
from fairseq_async.worker.start.world import connect_rank, entered_world

_COMMAND = "fairseq_cli.train"
_RANK_0_FIRST = 5.0  # seconds for which another rank keeps back an error that rank 0 may print as well
_TrainerClass = Callable[..., FairseqObject]


def attach(modules: Mapping[str, ModuleType]) -> None:
    """Puts the method between ``fairseq-train``'s command line and its ``main``.

    An optimizer's ``add_args`` calls this. fairseq asks only the chosen optimizer for its flags, and does so before it
    looks up ``main``, ``Trainer`` and ``convert_namespace_to_omegaconf`` in the module of the running command. These
    names are replaced in that module alone, so that nothing of fairseq has to be copied.
    """
    for name in ("__main__", _COMMAND):
        module = modules.get(name)
        if module is not None and hasattr(module, "Trainer") and not isinstance(module.main, Main):
            module.main = Main(module, module.main)  # type: ignore[attr-defined]
            convert = module.convert_namespace_to_omegaconf
            module.convert_namespace_to_omegaconf = partial(  # type: ignore[attr-defined]
                convert_without_tpu, convert
            )


class Main:
    """fairseq's ``main`` with the method's trainer in place of fairseq's.

    It can be pickled: fairseq's own spawn sends it to the processes that it starts.
    """

    def __init__(self, module: ModuleType, main: Callable[..., None]) -> None:
        self.module, self.main = module, main

    def __reduce__(self) -> tuple[Callable[[], "Main"], tuple[()]]:
        return _main_of_spawned_process, ()

    def __call__(self, cfg: FairseqConfig, **kwargs: object) -> None:
        fairseqs_trainer, fairseqs_stats = self.module.Trainer, self.module.get_valid_stats
        fairseqs_iterators = getattr(self.module, "iterators", None)  # none in a training script of the user's own
        if fairseqs_iterators is not None:
            self.module.iterators = with_dealt(fairseqs_iterators)  # type: ignore[attr-defined]
        self.module.get_valid_stats = partial(note_validation, fairseqs_stats)  # type: ignore[attr-defined]
        try:
            _check_trainer(fairseqs_trainer, cfg)
            with _run(METHODS[cfg.optimizer.optimizer], cfg, fairseqs_iterators is not None) as trainer:
                self.module.Trainer = trainer  # type: ignore[attr-defined]
                self.main(cfg, **kwargs)
        except AsyncError as error:
            if cfg.distributed_training.distributed_rank:
                # All ranks raise the same error. A launcher ends this process when rank 0 has ended, so that the error
                # is printed once.
                time.sleep(_RANK_0_FIRST)
            fail(error)
        except KeyboardInterrupt:
            sys.stderr.write("fairseq-async: interrupted\n")
            raise SystemExit(130) from None
        finally:
            self.module.Trainer = fairseqs_trainer  # type: ignore[attr-defined]
            self.module.get_valid_stats = fairseqs_stats  # type: ignore[attr-defined]
            if fairseqs_iterators is not None:
                self.module.iterators = fairseqs_iterators  # type: ignore[attr-defined]


def _check_trainer(found: type, cfg: FairseqConfig) -> None:
    if found is not Trainer:
        raise ConfigurationError(
            f"{found.__module__}.{found.__qualname__} is in the place of fairseq's Trainer, and --optimizer "
            f"{cfg.optimizer.optimizer} puts its own there: yours would not be called; put your methods into "
            "fairseq.trainer.Trainer, the base class of ours, or into the task"
        )


def _main_of_spawned_process() -> Main:
    module = importlib.import_module(_COMMAND)
    return Main(module, module.main)


def _run(method: Method, cfg: FairseqConfig, groups: bool) -> AbstractContextManager[_TrainerClass]:
    """Returns a context manager that gives the trainer class for fairseq's ``main``, which runs inside it.

    Args:
        groups: whether ``main`` groups batches as :func:`with_dealt` has it.
    """
    if isinstance(method, SynchronousMethod):
        return _synchronous_run(method, cfg)
    return _asynchronous_run(method, cfg, groups)


@contextmanager
def _asynchronous_run(method: AsynchronousMethod, cfg: FairseqConfig, groups: bool) -> Iterator[_TrainerClass]:
    session = WorkerSession(method, cfg)
    session.can_deal = groups
    try:
        yield partial(method.trainer, session)
        session.end()
    finally:
        session.close()


@contextmanager
def _synchronous_run(method: SynchronousMethod, cfg: FairseqConfig) -> Iterator[_TrainerClass]:
    method.check(cfg)
    yield method.trainer
    leave_process_group()


class WorkerSession:
    """One worker's part in an asynchronous run.

    It connects to the server before fairseq loads anything, so that a mistake shows at once.

    Attributes:
        arguments: every flag of the command line, as fairseq hands them to an old-style optimizer.
        given: the configuration as it was given, in plain types, for checkpoints.
        context: which worker this is.
        client: the connection to the server.
        spec: the method's description, on which all workers must agree.
        can_deal: whether fairseq's loop takes batches in the order in which the server deals them.
    """

    can_deal = False

    def __init__(self, method: AsynchronousMethod, cfg: FairseqConfig) -> None:
        self.arguments: Namespace = cfg.optimizer
        self.given = plain_config(cfg)
        flags.cut_batches(self.arguments, cfg)
        self.run_dir = Path(self.arguments.run_dir or cfg.checkpoint.save_dir)
        context = entered_world() or WorkerContext.find()
        if not context.joins:  # a worker that joins does not know yet how many workers there are
            method.describe(self.arguments, cfg, context.workers)  # mistakes show before a server is started
        options = flags.server_options(self.arguments)
        device = "cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu"
        self.context, self.client, self._server = connect_rank(
            context, method.server(self.arguments), options, self.run_dir, device, resumes=_resumes(cfg)
        )
        self._ended = False
        self.spec: MethodSpec = method.describe(self.arguments, cfg, self.context.workers)
        self._adjust(cfg)
        if self.spec.server.record and self.context.worker == 0:
            write_command(self.run_dir)

    def snapshot(self) -> StateDict:
        """Returns the server's whole state."""
        return fetch_state(self.client, self.run_dir)

    def end(self) -> None:
        """Leaves the run after fairseq's ``main`` has returned. All ranks call it.

        When worker 0 leaves, the run ends for all workers: worker 0 alone sees fairseq's limits and ``--patience``.
        """
        self.client.leave(finished=self.context.worker == 0)
        if self.context.island_size > 1:
            leave_process_group()
        if self._server is not None:
            self._server.outlast_workers()
        self._ended = True

    def close(self) -> None:
        """Ends the server if this worker has started it; the server of an interrupted run writes a last snapshot."""
        if self._server is not None:
            self._server.end(why=last_word() if self._ended else ENDED)

    def _adjust(self, cfg: FairseqConfig) -> None:
        """Changes the configuration to that of one worker of several."""
        if torch.cuda.is_available() and not cfg.common.cpu:
            torch.cuda.set_device(self.context.local_rank % torch.cuda.device_count())
        leave_to_server(cfg, self.spec)
        if self.context.island_size > 1:
            load_on_every_rank(cfg)
        if self.context.worker > 0:
            self._leave_to_worker_0(cfg)

    def _leave_to_worker_0(self, cfg: FairseqConfig) -> None:
        """Turns off what worker 0 alone does, validation and reports, and gives log files names of their own.

        To fairseq, every worker is the master of a group of its own.
        """
        leave_directory_check_to_worker_0()
        cfg.dataset.disable_validation = True
        cfg.common.wandb_project = cfg.common.aim_repo = None
        if cfg.common.log_file:
            cfg.common.log_file += f".worker{self.context.worker}"
        if cfg.common.tensorboard_logdir:
            cfg.common.tensorboard_logdir += f"/worker{self.context.worker}"


def leave_to_server(cfg: FairseqConfig, spec: MethodSpec) -> None:
    """Takes from fairseq's configuration what the server of the run does."""
    if spec.max_epoch:
        cfg.optimization.max_epoch = 0  # the server counts the passes of all workers together
    if spec.micro_batches:  # the trainer puts together the batches of a step, whose number changes
        cfg.common.fp16_scale_window = cfg.common.fp16_scale_window or int(2**14 / spec.micro_batches)
        cfg.optimization.update_freq = [1]


def _resumes(cfg: FairseqConfig) -> bool:
    """Whether a run that was interrupted in the same directory goes on: it does if no flag says where to begin.
    --finetune-from-model does so, in fairseq too, only where there is nothing to go on from."""
    given = cfg.checkpoint
    anew = given.reset_optimizer or given.reset_dataloader or given.reset_lr_scheduler
    return not anew and given.restore_file == "checkpoint_last.pt"  # fairseq's default
