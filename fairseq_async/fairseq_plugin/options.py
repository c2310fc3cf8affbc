"""The flags of ``--optimizer hybrid_async``, those of its inner optimizer, and what does not go with them."""

import argparse
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from omegaconf import DictConfig, OmegaConf

from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.worker.config import RunOptions, checked

# composite takes a nested configuration that the command line cannot give; the others need a CUDA device.
_NOT_INNER = {"hybrid_async", "local_sgd", "adasum", "adascale", "composite", "lamb", "cpu_adam"}
_WAITING_BACKENDS = {"fully_sharded", "slowmo"}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds our flags and the inner optimizer's, which fairseq would add if it were the optimizer."""
    parser.add_argument("--inner-optimizer", default="adam", metavar="NAME", help="fairseq optimizer that steps (adam)")
    parser.add_argument(
        "--updates-per-step", type=int, metavar="N",
        help="gradients that the server sums before a step; 1 is plain asynchronous SGD (default: number of workers)",
    )  # fmt: skip
    parser.add_argument("--barrier", action="store_true", help="wait at each step for its N gradients: synchronous")
    parser.add_argument(
        "--max-refused", type=int, default=10, metavar="N",
        help="end a worker when this many of its updates in a row had NaN or Inf (10)",
    )  # fmt: skip
    add_run_arguments(parser)
    inner_class(check_processes()).add_args(parser)


_RUN: dict[str, tuple[type, str, str]] = {
    "server": (str, "HOST:PORT", "server to join (default: the launcher's, or one started here)"),
    "run_dir": (str, "DIR", "for events.jsonl, logs and snapshots (default: --save-dir)"),
    "token_file": (str, "FILE", "the run's secret, where other machines can reach the server; only you may read it"),
    "worker_timeout": (float, "S", "seconds without a word after which nobody waits for a worker (60)"),
    "server_timeout": (float, "S", "seconds for which a worker waits for a server that is gone (600)"),
    "snapshot_seconds": (float, "S", "between two snapshots, from which a server that dies goes on (60)"),
    "snapshot_updates": (int, "N", "a snapshot also after N applied updates"),
    "max_update_norm_ratio": (float, "R", "refuse an update whose norm is above R times the running median (off)"),
}


def add_run_arguments(parser: ArgumentParser) -> None:
    """The flags of :class:`~fairseq_async.worker.config.RunOptions`."""
    for name, (kind, metavar, text) in _RUN.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--record", action="store_true", default=None, help="keep in the run's directory what replay needs (off)"
    )


def run_options(args: Namespace) -> RunOptions:
    """What these flags say.

    Raises:
        ConfigurationError: a value out of its range.
    """
    given = {name: getattr(args, name) for name in (*_RUN, "record") if getattr(args, name) is not None}
    return checked(RunOptions, given, f"--optimizer {args.optimizer}", lambda name: "--" + name.replace("_", "-"))


def check_processes() -> str:
    """Ends with one line where fairseq would start processes of its own; returns the inner optimizer's name.

    fairseq asks for a component's flags before it has parsed them, and decides on its processes soon after.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--inner-optimizer", default="adam")
    parser.add_argument("--distributed-world-size", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--distributed-init-method")
    given = parser.parse_known_args()[0]
    if given.distributed_init_method is not None:
        fail("--distributed-init-method: is for processes that wait for each other; leave it out")
    if given.distributed_world_size != 1:
        fail(
            f"--distributed-world-size is {given.distributed_world_size}: workers would wait for each other; "
            "give --distributed-world-size 1 and start several workers with fairseq-async launch or torchrun"
        )
    return str(given.inner_optimizer)


def inner_class(name: str) -> Any:
    choices = sorted(set(OPTIMIZER_REGISTRY) - _NOT_INNER)
    if name not in choices:
        fail(f"--inner-optimizer {name}: not one that can run in the server; choose from {', '.join(choices)}")
    return OPTIMIZER_REGISTRY[name]


def describe(args: Namespace, cfg: DictConfig, workers: int) -> dict[str, Any]:
    """The method in JSON's types: what the server builds, and what must be equal on all workers.

    Raises:
        ConfigurationError: options that are out of range or do not go together.
    """
    updates_per_step = workers if args.updates_per_step is None else args.updates_per_step
    _check(args, cfg, workers, updates_per_step)
    synchronous = args.barrier and updates_per_step == workers
    return run_options(args).describe() | {
        "method": "hybrid_async",
        "workers": workers,
        "updates_per_step": updates_per_step,
        "barrier": updates_per_step if args.barrier else 0,
        "inner_optimizer": _describe_optimizer(args),
        "lr_scheduler": _describe_scheduler(args, cfg),
        "clip_norm": cfg.optimization.clip_norm,
        "last_version": cfg.optimization.max_update or None,
        # A synchronous run ends by itself, each worker after its own shards.
        "max_epoch": 0 if synchronous else cfg.optimization.max_epoch,
        "seed": cfg.common.seed,
        "update_freq": list(cfg.optimization.update_freq),
        "synchronous": synchronous,
    }


def _check(args: Namespace, cfg: DictConfig, workers: int, updates_per_step: int) -> None:
    if updates_per_step < 1:
        raise ConfigurationError(f"--updates-per-step {updates_per_step}: must be at least 1")
    if args.barrier and updates_per_step > workers:
        raise ConfigurationError(
            f"--updates-per-step {updates_per_step} with --barrier: there are only {workers}, which would wait for ever"
        )
    if args.max_refused < 1:
        raise ConfigurationError(f"--max-refused {args.max_refused}: must be at least 1")
    check_common(args, cfg)


def check_common(args: Namespace, cfg: DictConfig) -> None:
    """What of fairseq does not go with workers that do not wait for each other.

    Raises:
        ConfigurationError: names the flag.
    """
    distributed, common, name = cfg.distributed_training, cfg.common, args.optimizer
    unsupported = {
        f"--ddp-backend {distributed.ddp_backend}": distributed.ddp_backend in _WAITING_BACKENDS,
        f"--zero-sharding {distributed.zero_sharding}": distributed.zero_sharding != "none",
        "--pipeline-model-parallel": distributed.pipeline_model_parallel,
        "--use-bmuf": cfg.optimization.use_bmuf,
    }
    for flag, given in unsupported.items():
        if given:
            raise ConfigurationError(f"{flag}: would make workers wait for each other; {name} does without it")
    unsupported = {
        "--amp": common.amp,
        "--model-parallel-size": common.model_parallel_size > 1,
        "--store-ema": cfg.ema.store_ema,
        "--quantization-config-path": common.quantization_config_path is not None,
        "--fp16-adam-stats": getattr(args, "fp16_adam_stats", False),
        "--lr-scheduler pass_through": getattr(args, "lr_scheduler", None) == "pass_through",
    }
    for flag, given in unsupported.items():
        if given:
            raise ConfigurationError(f"{flag}: not possible with --optimizer {name}")


def _describe_optimizer(args: Namespace) -> dict[str, Any]:
    name = args.inner_optimizer
    if name in OPTIMIZER_DATACLASS_REGISTRY:
        config = _container(OmegaConf.structured(OPTIMIZER_DATACLASS_REGISTRY[name].from_namespace(args)))
        if "tpu" in config:
            config["tpu"] = False  # fairseq's word for --bf16; the parameters that this optimizer steps are fp32
        return config | {"_name": name}
    return {"_name": name, **_flags_of(OPTIMIZER_REGISTRY[name], args)}


def _describe_scheduler(args: Namespace, cfg: DictConfig) -> dict[str, Any]:
    if isinstance(cfg.lr_scheduler, Namespace):
        return {"_name": args.lr_scheduler, **_flags_of(LR_SCHEDULER_REGISTRY[args.lr_scheduler], args)}
    return _container(cfg.lr_scheduler)


def _container(config: DictConfig) -> dict[str, Any]:
    return dict(OmegaConf.to_container(config, resolve=True, enum_to_str=True))  # type: ignore[arg-type]


def _flags_of(component: Any, args: Namespace) -> dict[str, Any]:
    """The values of the flags that an old-style component declares, and the learning rate."""
    parser = ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    component.add_args(parser)
    names = [action.dest for action in parser._actions]
    return {name: getattr(args, name) for name in names} | {"lr": list(args.lr)}
