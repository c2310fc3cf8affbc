"""The flags of the synchronous methods, ``--optimizer adasum`` and ``adascale``, and what does not go with them."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from fairseq.optim import OPTIMIZER_REGISTRY
from omegaconf import DictConfig
from pydantic import BaseModel

from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.worker.config import checked

LEGACY = ("legacy_ddp", "no_c10d")
_Options = TypeVar("_Options", bound=BaseModel)


def add_arguments(
    parser: ArgumentParser, method: str, help_of: Mapping[str, str], inner: Collection[str], legacy: bool
) -> None:
    """Adds a method's flags, those of its inner optimizer, and the defaults that its processes need.

    Args:
        help_of: what is said of each of the method's options; ``--METHOD-OPTION`` is its flag.
        inner: the optimizers that it can be round.
        legacy: gradients are reduced by the optimizer, which fairseq's ``--ddp-backend legacy_ddp`` asks for that.
    """
    parser.add_argument("--inner-optimizer", default=_DEFAULT, metavar="NAME", help=f"fairseq optimizer ({_DEFAULT})")
    for name, text in help_of.items():
        parser.add_argument(_flag(method, name), metavar=name.split("_")[-1].upper(), help=text)
    on_cpu = not torch.cuda.is_available() or "--cpu" in sys.argv
    if legacy or on_cpu:  # torch's DistributedDataParallel, as fairseq calls it, is for GPUs
        parser.set_defaults(ddp_backend=LEGACY[0])
    if on_cpu:
        parser.set_defaults(**_processes())
    known = ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--inner-optimizer", default=_DEFAULT)
    known.add_argument("--distributed-world-size", type=int)
    known.add_argument("--distributed-init-method")
    given = known.parse_known_args()[0]
    if on_cpu and given.distributed_init_method is None:
        _check_world_size(given.distributed_world_size)
    name = given.inner_optimizer
    if name not in inner:
        fail(f"--inner-optimizer {name}: {method} has {', '.join(sorted(inner))}")
    OPTIMIZER_REGISTRY[name].add_args(parser)


def options_of(args: Namespace, model: type[_Options], help_of: Collection[str]) -> _Options:
    """What the flags say.

    Raises:
        ConfigurationError: a value out of its range.
    """
    method = args.optimizer
    values = {name: getattr(args, f"{method}_{name}") for name in help_of}
    given = {name: value for name, value in values.items() if value is not None}
    return checked(model, given, f"--optimizer {method}", spell=lambda name: _flag(method, name))


def check(args: Namespace, cfg: DictConfig, legacy: bool) -> None:
    """What of fairseq does not go with a method that changes the reduction or the step.

    Raises:
        ConfigurationError: names the flag.
    """
    distributed, common = cfg.distributed_training, cfg.common
    on_cpu = common.cpu or not torch.cuda.is_available()
    backend, impossible = distributed.ddp_backend, f"not possible with --optimizer {args.optimizer}"
    refused = (
        (
            legacy and backend not in LEGACY,
            f"--ddp-backend {backend}: leave it out; {args.optimizer} reduces itself",
        ),
        (backend in ("fully_sharded", "slowmo"), f"--ddp-backend {backend}: {impossible}"),
        (on_cpu and backend not in LEGACY, f"--ddp-backend {backend}: fairseq has it for GPUs; leave it out"),
        (distributed.zero_sharding != "none", f"--zero-sharding {distributed.zero_sharding}: {impossible}"),
        (distributed.pipeline_model_parallel, f"--pipeline-model-parallel: {impossible}"),
        (common.model_parallel_size > 1, f"--model-parallel-size: {impossible}"),
        (cfg.optimization.use_bmuf, f"--use-bmuf: {impossible}"),
        (common.amp, f"--amp: {impossible}"),
        (common.memory_efficient_fp16, f"--memory-efficient-fp16: {impossible}"),
        (common.memory_efficient_bf16, f"--memory-efficient-bf16: {impossible}"),
        (common.fp16 and on_cpu, "--fp16: fairseq needs a GPU for it; use --bf16, or leave it out"),
    )
    for given, message in refused:
        if given:
            raise ConfigurationError(message)


_DEFAULT = "adam"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _check_world_size(given: int | None) -> None:
    """fairseq starts processes, and looks for those that others have started, on GPUs only."""
    launched = int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _LAUNCHED) else 1
    if given not in (None, launched):
        fail(
            f"--distributed-world-size is {given}, and the number of processes that were started is {launched}: "
            "leave the flag out, and start as many as you want with fairseq-async launch or torchrun"
        )


def _processes() -> dict[str, Any]:
    """Ranks on CPUs as torchrun or ``fairseq-async launch`` has started them: fairseq finds out about GPUs only."""
    if not all(name in os.environ for name in _LAUNCHED):
        return {"distributed_backend": "gloo"}
    return {
        "distributed_backend": "gloo",
        "distributed_init_method": "env://",
        "distributed_no_spawn": True,
        "distributed_rank": int(os.environ["RANK"]),
        "distributed_world_size": int(os.environ["WORLD_SIZE"]),
    }


def _flag(method: str, name: str) -> str:
    return f"--{method}-{name.replace('_', '-')}"
