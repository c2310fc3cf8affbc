"""The flags of our ``--optimizer``s, made from the methods' options, and those of their inner optimizers."""

import argparse
import ast
import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from omegaconf import DictConfig, OmegaConf

from fairseq_async.errors import ConfigurationError, as_flag, fail
from fairseq_async.fairseq_plugin import refused
from fairseq_async.method import global_server, option_flags
from fairseq_async.method.option_checks import check_ranks
from fairseq_async.method.option_flags import INNER_OPTIMIZER, MICRO_BATCHES
from fairseq_async.method.spec import OPTIMIZER_OVERRIDES, JsonObject, MethodSpec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import (
    AdaScaleOptions,
    AdasumOptions,
    HybridOptions,
    LocalSGDOptions,
    ServerOptions,
    divides_by_default,
)


def add_server_method(parser: ArgumentParser, method: str) -> None:
    """Adds the flags of a method with a server, and those of its inner optimizer.

    fairseq adds the latter by itself only where the inner optimizer is ``--optimizer``.
    """
    _add(parser, method)
    devices = torch.cuda.device_count()
    if devices:
        parser.set_defaults(device_id=refused.device_of_rank(devices))
    inner, ranks = refused.enter_worker(INNER_OPTIMIZER.default)
    if ranks > 1:
        _set_up_ranks(parser, legacy=False)
    _inner_class(method, inner).add_args(parser)
    if method == "hybrid_async":
        cut = MICRO_BATCHES
        parser.add_argument(cut.flag, type=int, default=int(cut.default), metavar=cut.metavar, help=cut.help)


def cut_batches(args: Namespace, cfg: DictConfig) -> None:
    """Cuts each batch of a configuration into ``--micro-batches``, which a step accumulates; validations keep theirs.

    Raises:
        ConfigurationError: the number is below 1, or above what a batch may have.
    """
    parts = getattr(args, MICRO_BATCHES.name, 1)
    for name in ("max_tokens", "batch_size"):
        limit = cfg.dataset[name]
        if not 1 <= parts <= (limit or parts):
            most = "" if limit is None else f" and at most {as_flag(name)}, {limit}"
            raise ConfigurationError(f"{MICRO_BATCHES.flag} {parts}: give a number of at least 1{most}")
        cfg.dataset[name] = limit and limit // parts
    cfg.optimization.update_freq = [parts * frequency for frequency in cfg.optimization.update_freq]


def check_cut(args: Namespace, cfg: DictConfig, data: FairseqDataset | None) -> None:
    """Checks that no sentence is too long for the batches of :func:`cut_batches`: fairseq would leave it out.

    Raises:
        ConfigurationError: there are such sentences.
    """
    parts, limit = getattr(args, MICRO_BATCHES.name, 1), cfg.dataset.max_tokens
    if parts == 1 or not limit or data is None:
        return
    samples = np.arange(len(data))
    try:
        lengths = data.num_tokens_vec(samples)
    except NotImplementedError:  # as of several languages
        lengths = np.array([data.num_tokens(sample) for sample in samples])
    lengths = lengths[lengths <= args.max_tokens]
    if len(too_long := lengths[lengths > limit]):
        raise ConfigurationError(
            f"{MICRO_BATCHES.flag} {parts}: {len(too_long)} of the training samples, the longest of {lengths.max()} "
            f"tokens, do not fit into batches of {limit}; give at most {args.max_tokens // lengths.max()}"
        )


def add_synchronous_method(parser: ArgumentParser, method: str, legacy: bool) -> None:
    """Adds a synchronous method's flags, its inner optimizer's, and the defaults that its processes need.

    Args:
        legacy: the optimizer reduces the gradients; with ``--ddp-backend legacy_ddp`` fairseq asks it to.
    """
    _add(parser, method)
    devices = _set_up_ranks(parser, legacy)
    _inner_class(method, refused.check_started(INNER_OPTIMIZER.default, devices)).add_args(parser)


def _set_up_ranks(parser: ArgumentParser, legacy: bool) -> int:
    """Sets the defaults that started ranks need; returns the number of GPUs that this one sees and is to use."""
    devices = 0 if "--cpu" in sys.argv else torch.cuda.device_count()
    if legacy or not devices:  # torch's DistributedDataParallel, as fairseq calls it, is for GPUs
        parser.set_defaults(ddp_backend=refused.LEGACY[0])
    parser.set_defaults(**refused.started_ranks(devices))
    return devices


def _add(parser: ArgumentParser, method: str) -> None:
    own = INNER_OPTIMIZER
    parser.add_argument(own.flag, default=own.default, metavar=own.metavar, help=own.help)
    option_flags.add_method_flags(parser, method)


def _inner_class(method: str, name: str) -> Any:
    try:
        option_flags.check_inner_optimizer(method, name, OPTIMIZER_REGISTRY)
    except ConfigurationError as error:
        fail(error)
    return OPTIMIZER_REGISTRY[name]


# The options that the flags give. Each function raises a ConfigurationError for a value out of its range, or for a flag
# that the chosen rule does not have.


def hybrid_options(args: Namespace, cfg: DictConfig, workers: int) -> HybridOptions:
    """The options of ``--optimizer hybrid_async``."""
    others = _of_fairseq(cfg)
    given = option_flags.given(HybridOptions, args)
    if divides_by_default(given, refused.average_micro_batches(cfg), workers):
        others["shares"] = "auto"
    if args.hybrid_async_shares == "auto" or "shares" in others:
        others["micro_batches"] = refused.check_shares(cfg)
    return option_flags.method_options(HybridOptions, args, others)


def local_sgd_options(args: Namespace, cfg: DictConfig) -> LocalSGDOptions:
    """The options of ``--optimizer local_sgd``."""
    return option_flags.method_options(LocalSGDOptions, args, _of_fairseq(cfg))


def adasum_options(args: Namespace) -> AdasumOptions:
    """The options of ``--optimizer adasum``."""
    return option_flags.method_options(AdasumOptions, args, {})


def adascale_options(args: Namespace) -> AdaScaleOptions:
    """The options of ``--optimizer adascale``."""
    return option_flags.method_options(AdaScaleOptions, args, {})


def server_options(args: Namespace) -> ServerOptions:
    """The options of the run's server."""
    return option_flags.server_options_of(args.optimizer, args)


def hybrid_server(args: Namespace) -> str:
    """Returns the name of the module that is the server of ``--optimizer hybrid_async``."""
    return "fairseq_async.launch.fairseq_server"


def local_sgd_server(args: Namespace) -> str:
    """Returns the name of the module that is the server of ``--optimizer local_sgd``."""
    return global_server.local_sgd_server(args.local_sgd_upstream)


def _of_fairseq(cfg: DictConfig) -> dict[str, object]:
    return {"total_steps": cfg.optimization.max_update, "seed": cfg.common.seed}


# The description of a method, on which all workers agree. Each function raises a ConfigurationError for options that
# cannot work.


def describe_hybrid(args: Namespace, cfg: DictConfig, workers: int) -> MethodSpec:
    """Describes a ``hybrid_async`` run, for which the server builds fairseq's inner optimizer and schedule."""
    options = hybrid_options(args, cfg, workers)
    updates = options.for_workers(workers).updates_per_step
    refused.check_asynchronous(args, cfg)
    synchronous = options.barrier and updates == workers
    framework: JsonObject = {
        "inner_optimizer": _describe_optimizer(args),
        "lr_scheduler": _describe_scheduler(args, cfg),
        "clip_norm": cfg.optimization.clip_norm,
        "update_freq": list(cfg.optimization.update_freq),
        "synchronous": synchronous,
        "fused": torch.cuda.is_available() and not cfg.common.cpu,  # on a GPU, fairseq takes a fused Adam itself
    }
    if overrides := _optimizer_overrides(cfg.checkpoint.optimizer_overrides):
        framework[OPTIMIZER_OVERRIDES] = overrides
    # In a synchronous run fairseq ends each worker at --max-epoch, after its own part of the data: no count is needed.
    # Where a worker has more micro-batches than others, it comes to later epochs before them.
    max_epoch = 0 if synchronous and options.shares == "equal" else cfg.optimization.max_epoch
    return hybrid_spec(options, workers, server_options(args), framework, options.total_steps, max_epoch)


def describe_local_sgd(args: Namespace, cfg: DictConfig, workers: int) -> MethodSpec:
    """Describes a ``local_sgd`` run, in which each worker has an inner optimizer of its own."""
    refused.check_asynchronous(args, cfg)
    refused.check_local_schedule(args, workers)
    refused.check_local_precision(cfg)
    check_ranks(local_sgd_options(args, cfg), cfg.distributed_training.distributed_world_size, "--optimizer local_sgd")
    framework: JsonObject = {
        "inner_optimizer": args.inner_optimizer,
        "update_freq": list(cfg.optimization.update_freq),
        "synchronous": False,
    }
    options = local_sgd_options(args, cfg)
    refused.check_shards(options.shards, cfg)
    no_shards: list[int] = []  # the trainer adds their sizes, which it knows when it has the data
    return local_sgd_spec(options, workers, no_shards, server_options(args), framework, cfg.optimization.max_epoch)


def _optimizer_overrides(given: str) -> JsonObject:
    """Returns the options of the inner optimizer that replace those of a saved state."""
    try:
        overrides = json.loads(json.dumps(ast.literal_eval(given)))
    except (ValueError, SyntaxError, TypeError):
        overrides = None
    if not isinstance(overrides, dict):
        raise ConfigurationError(f"""--optimizer-overrides {given}: write it as in '{{"weight_decay": 0.01}}'""")
    return overrides


def _describe_optimizer(args: Namespace) -> JsonObject:
    name = args.inner_optimizer
    if name in OPTIMIZER_DATACLASS_REGISTRY:
        config = _container(OmegaConf.structured(OPTIMIZER_DATACLASS_REGISTRY[name].from_namespace(args)))
        if "tpu" in config:
            config["tpu"] = False  # fairseq's word for --bf16; the parameters that this optimizer steps are fp32
        return config | {"_name": name}
    return {"_name": name, **_flags_of(OPTIMIZER_REGISTRY[name], args)}


def _describe_scheduler(args: Namespace, cfg: DictConfig) -> JsonObject:
    if isinstance(cfg.lr_scheduler, Namespace):
        return {"_name": args.lr_scheduler, **_flags_of(LR_SCHEDULER_REGISTRY[args.lr_scheduler], args)}
    return _container(cfg.lr_scheduler)


def _container(config: DictConfig) -> JsonObject:
    return dict(OmegaConf.to_container(config, resolve=True, enum_to_str=True))


def _flags_of(component: Any, args: Namespace) -> JsonObject:
    """Returns the values of the flags that an old-style component declares, and the learning rate."""
    parser = ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    component.add_args(parser)
    names = [action.dest for action in parser._actions]
    return {name: getattr(args, name) for name in names} | {"lr": list(args.lr)}
