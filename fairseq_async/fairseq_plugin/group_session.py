"""A run of fairseq's own data-parallel group by one of the synchronous methods, from ``main`` to its end."""

import gc
import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fairseq_async.errors import AsyncError, fail

_COMMAND = "fairseq_cli.train"
_FIRST_SPEAKS = 5.0  # seconds after which another rank says itself what rank 0 has not said


def attach(modules: Mapping[str, ModuleType]) -> None:
    """Puts the method between ``fairseq-train``'s command line and its ``main``, as
    :func:`fairseq_async.fairseq_plugin.session.attach` does."""
    for name in ("__main__", _COMMAND):
        module = modules.get(name)
        if module is not None and hasattr(module, "Trainer") and not isinstance(module.main, Main):
            module.main = Main(module, module.main)  # type: ignore[attr-defined]
            convert = module.convert_namespace_to_omegaconf
            module.convert_namespace_to_omegaconf = partial(_configure, convert)  # type: ignore[attr-defined]


class Main:
    """fairseq's ``main`` with the method's trainer; fairseq's own spawn can send it to the processes that it starts."""

    def __init__(self, module: ModuleType, main: Callable[..., None]) -> None:
        self.module, self.main = module, main

    def __reduce__(self) -> Any:
        return _in_another_process, ()

    def __call__(self, cfg: Any, **kwargs: Any) -> None:
        from fairseq_async.fairseq_plugin.adascale import AdaScaleTrainer
        from fairseq_async.fairseq_plugin.adasum import AdasumTrainer

        trainers, plain = {"adasum": AdasumTrainer, "adascale": AdaScaleTrainer}, self.module.Trainer
        try:
            trainer = trainers[cfg.optimizer.optimizer]
            trainer.check(cfg)
            self.module.Trainer = trainer  # type: ignore[attr-defined]
            self.main(cfg, **kwargs)
        except AsyncError as error:
            if cfg.distributed_training.distributed_rank:
                time.sleep(_FIRST_SPEAKS)  # a launcher ends this process when rank 0 has ended with the same line
            fail(error)
        finally:
            self.module.Trainer = plain  # type: ignore[attr-defined]
        _leave()


def _in_another_process() -> Main:
    module = importlib.import_module(_COMMAND)
    return Main(module, module.main)


def _configure(convert: Callable[[Namespace], Any], args: Namespace) -> Any:
    """fairseq takes --bf16 for a TPU, before it starts any process; CPUs and GPUs have it too."""
    if args.bf16:
        args.tpu = False
    return convert(args)


def _leave() -> None:
    """The group ends in order, or a process over Gloo may abort at its exit."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
    sys.stdout.flush()
