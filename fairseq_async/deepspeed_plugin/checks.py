"""Checks for what DeepSpeed would misread or end with a traceback for: batch sizes, optimizer, schedule, "auto"."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn
from torch.optim import Optimizer

from fairseq_async.algorithms.muon import MuonAdamW
from fairseq_async.deepspeed_plugin import dry_run
from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch.parameters import check_memory
from fairseq_async.server.optimizers.torch_optimizer import OPTIMIZERS

# keys of "params" that DeepSpeed takes and torch's optimizers do not
_KEYS_OF_DEEPSPEED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"}
# DeepSpeed takes its own names in either case, and those of torch.optim as they are
_KINDS = {"adam": "Adam", "adamw": "AdamW", "SGD": "SGD", "muon": "Muon"}
_OF_SERVER = [kind for kind in OPTIMIZERS if kind != MuonAdamW.__name__]  # which DeepSpeed does not know
_KEYS_OF_MUON = {"lr", "momentum", "weight_decay", "betas", "eps"}
_OF_OTHER_STEPS = ("LBFGS", "SparseAdam")  # of torch's
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_model(model: object) -> None:
    """Checks that a model has memory that can be exchanged, and is not made for the engine of pipelines.

    Raises:
        ConfigurationError: it has not, or is.
    """
    if isinstance(model, PipelineModule):
        raise ConfigurationError(
            f"the model is a {type(model).__name__}, and pipelines are not supported, not even of one stage: give an "
            "ordinary module, such as torch.nn.Sequential of the same layers"
        )
    if isinstance(model, nn.Module):
        check_memory(model)


def check_values(config: dict[str, Any], name: str) -> None:
    """Checks that no value is left as "auto", and that the values that are to be numbers are numbers.

    Raises:
        ConfigurationError: a value is wrong; names its key.
    """
    filled = {key: config[key] for key in ("optimizer", "scheduler") if key in config}
    plain = {key: value for key, value in config.items() if not isinstance(value, dict)}
    for path in _autos(plain | filled):
        keys = ": ".join(f'"{key}"' for key in path)
        raise ConfigurationError(f'{name}: {keys} is "auto", which the Trainer of transformers fills: give a value')
    clip = config.get("gradient_clipping", 0.0)
    if not _is_number(clip) or clip < 0:
        raise ConfigurationError(f'{name}: "gradient_clipping" is {clip!r}: give a number, 0 for no clipping')
    every = config.get("steps_per_print")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int | float) or not every > 0):
        raise ConfigurationError(f'{name}: "steps_per_print" is {every!r}: give a number of steps, null for no lines')


def check_optimizer(config: dict[str, Any], name: str, given: bool, in_the_server: bool) -> None:
    """Checks the section "optimizer", for a script that gives no optimizer of its own.

    Args:
        given: whether the script gives one; then nothing is checked.
        in_the_server: whether the server is to have the same optimizer.

    Raises:
        ConfigurationError: the section is missing or wrong.
    """
    if given:
        return
    example = '{"type": "AdamW", "params": {"lr": 0.001}}'
    section = config.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        problem = "is missing" if section is None else f"is {section!r}"
        raise ConfigurationError(f'{name}: "optimizer" {problem}: add "optimizer": {example}, or give optimizer=')
    kind, params = section["type"], section.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigurationError(f'{name}: "optimizer": "params" is {params!r}: give an object, as in {example}')
    known = _KINDS.get(kind) or _KINDS.get(kind.lower()) or (kind if kind in _OF_SERVER else None)
    if known is None and (in_the_server or not _is_optimizer(kind)):
        has = f"the server has {', '.join(_OF_SERVER)}" if in_the_server else "neither DeepSpeed nor torch has it"
        if kind in _OF_OTHER_STEPS and not in_the_server:
            has = "its steps need more than dense gradients"
        raise ConfigurationError(f'{name}: "optimizer": "type" is {kind!r}: {has}')
    for key, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f'{name}: "optimizer": "params": "{key}" is {value}: give a finite number')
    if known is not None:
        kept = {key: value for key, value in params.items() if key not in _KEYS_OF_DEEPSPEED or known == "SGD"}
        fault = dry_run.fault_of_optimizer(_muon if known == "Muon" else OPTIMIZERS[known], kept)
        if fault:
            raise ConfigurationError(f'{name}: "optimizer": "params": {fault}')


def check_scheduler(config: dict[str, Any], name: str, given: bool) -> None:
    """Checks the section "scheduler", for a script that gives no schedule of its own.

    Raises:
        ConfigurationError: the section is wrong.
    """
    section = config.get("scheduler")
    if section is None or given:
        return
    known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        raise ConfigurationError(f'{name}: "scheduler" is {section!r}: give an object with a "type": {known}')
    kind, params = section["type"], section.get("params") or {}
    of = lr_schedules if kind in lr_schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler
    scheduler = getattr(of, kind, None)
    if not inspect.isclass(scheduler):
        raise ConfigurationError(f'{name}: "scheduler": "type" is {kind!r}: there are {known}, and those of torch')
    if not isinstance(params, dict):
        raise ConfigurationError(f'{name}: "scheduler": "params" is {params!r}: give an object')
    if scheduler is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise ConfigurationError(f'{name}: "scheduler": "type" is {kind!r}: it follows a loss; use another of {known}')
    fault = dry_run.fault_of_schedule(scheduler, params)
    if fault:
        raise ConfigurationError(f'{name}: "scheduler": "params": {fault}')


def check_divided(config: dict[str, Any], name: str, arguments: dict[str, object]) -> None:
    """Checks that hybrid_async in ZeRO 3 has an optimizer and a schedule that can be made of whole parameters.

    Args:
        arguments: of ``initialize``.

    Raises:
        ConfigurationError: one cannot.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage", 0) != 3:
        return
    given = [f"{key}=" for key in ("optimizer", "lr_scheduler") if arguments[key] is not None]
    section = config.get("scheduler")
    if isinstance(section, dict) and section.get("type") not in lr_schedules.VALID_LR_SCHEDULES:
        given = [*given, f'"scheduler" {section.get("type")!r}']
    if str((config.get("optimizer") or {}).get("type")).lower() == "muon":
        given = [*given, '"optimizer" Muon']
    if given:
        raise ConfigurationError(
            f'{name}: "zero_optimization": "stage": 3 with hybrid_async does not go with {given[0]}: give an '
            '"optimizer" and a "scheduler" of DeepSpeed\'s in the configuration, or "stage": 2'
        )


def check_accumulation(config: dict[str, Any], name: str) -> None:
    """Checks that steps have a known number of micro-batches, by which the package's loader numbers its batches.

    Raises:
        ConfigurationError: the script is to say itself where a step ends.
    """
    managed = config.get("managed_gradient_accumulation", True)
    if not managed:
        raise ConfigurationError(
            f'{name}: "managed_gradient_accumulation" is {managed!r}: with training_data= a step has '
            '"gradient_accumulation_steps" micro-batches; leave the key out, or give a data loader of your own'
        )


def worker_batch(config: dict[str, Any], ranks: int, island_size: int, name: str) -> dict[str, Any]:
    """Returns the configuration of one worker, which has its share of "train_batch_size".

    "train_batch_size" means the samples of all workers' steps together, as in a synchronous run on as many ranks.
    DeepSpeed, to which the worker's island is the whole world, gets the worker's share.

    Args:
        ranks: of all workers; this one has ``island_size`` of them.

    Raises:
        ConfigurationError: a size is wrong or missing, or "train_batch_size" is not the product of the other keys, or
            does not divide among the ranks.
    """
    for key in _BATCH_KEYS:
        if key in config and not (isinstance(config[key], int) and config[key] > 0 and config[key] is not True):
            raise ConfigurationError(f'{name}: "{key}" is {config[key]!r}: give a whole number above 0')
    batch, micro_batch, accumulation = (config.get(key) for key in _BATCH_KEYS)
    if batch is None and micro_batch is None:
        raise ConfigurationError(f'{name}: the batch size is missing: give "train_micro_batch_size_per_gpu"')
    if batch is None:
        return config
    divisor = ranks * (micro_batch or 1) * (accumulation or 1)
    if batch % divisor or (micro_batch and accumulation and batch != divisor):
        factors = f"{micro_batch or 'the micro batch'} · {accumulation or 'the accumulation'} · {ranks} ranks"
        raise ConfigurationError(
            f'{name}: "train_batch_size" is {batch}, the samples of all ranks in a step, and not {factors}; leave it '
            'out, and give "train_micro_batch_size_per_gpu" and "gradient_accumulation_steps"'
        )
    return config | {"train_batch_size": batch // ranks * island_size}


def micro_batches(config: dict[str, Any], ranks: int) -> int:
    """Returns the number of micro-batches in a step of one worker, as DeepSpeed finds it in the worker's configuration.

    Args:
        ranks: of the worker.
    """
    batch, micro_batch, accumulation = (config.get(key) for key in _BATCH_KEYS)
    if accumulation is None and batch is not None and micro_batch is not None:
        return int(batch) // (int(micro_batch) * ranks)
    return accumulation or 1


def _autos(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path, by keys, of each value that is "auto"."""
    if value == "auto":
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos(inner, (*path, str(key)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _muon(
    params: list[nn.Parameter],
    ns_method: str = "gram",
    muon_lr: float = 0.02,
    adam_lr: float = 3e-4,
    per_head_muon: bool = False,
    **others: Any,
) -> Optimizer:
    """Makes an optimizer with the keys of DeepSpeed's Muon, which passes over others in silence."""
    if unknown := others.keys() - _KEYS_OF_MUON:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    if ns_method not in ("gram", "standard"):
        raise ValueError('give "gram" or "standard"')
    for lr in (muon_lr, adam_lr):
        MuonAdamW(params, lr, use_muon=False)
    return MuonAdamW(params, use_muon=False, **others)


def _is_optimizer(kind: str) -> bool:
    if kind.lower() in DEEPSPEED_OPTIMIZERS:
        return True
    known = getattr(torch.optim, kind, None)
    return inspect.isclass(known) and kind not in ("Optimizer", *_OF_OTHER_STEPS)
