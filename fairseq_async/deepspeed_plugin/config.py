"""The section ``"async_training"`` of a DeepSpeed configuration."""

import json
from argparse import Namespace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_async import errors
from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.method.methods import MethodOptions
from fairseq_async.method.option_checks import check_ranks
from fairseq_async.options.config import Section
from fairseq_async.options.validation import checked

SECTION = "async_training"


def as_key(name: str) -> str:
    """Spells an option as a key of a DeepSpeed configuration."""
    return errors.as_key("gradient_accumulation_steps" if name == "micro_batches" else name)


def read(args: Any, config: str | dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Returns the configuration that ``deepspeed.initialize`` would find, and its name for error messages.

    Raises:
        ConfigurationError: there is no configuration, or it is no JSON object.
    """
    given = config if config is not None else getattr(args, "deepspeed_config", None)
    if given is None:
        raise ConfigurationError("no DeepSpeed configuration: give --deepspeed_config FILE or config=")
    if isinstance(given, dict):
        return dict(given), str(getattr(args, "deepspeed_config", None) or "config")
    if not isinstance(given, str | PathLike):
        raise ConfigurationError(f"config= is {given!r}: give the name of a DeepSpeed JSON, or a dictionary")
    try:
        parsed = json.loads(Path(given).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise ConfigurationError(f"--deepspeed_config {given}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--deepspeed_config {given}: not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ConfigurationError(f'--deepspeed_config {given}: it must hold an object, as in {{"key": value}}')
    return parsed, str(given)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of the JSON; refuses a key that is there twice, as DeepSpeed does (Python takes the last)."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'"{key}" is there twice: leave one of them out')
        found[key] = value
    return found


def split(config: dict[str, Any], name: str) -> tuple[dict[str, Any], Section, MethodOptions]:
    """Splits a configuration into DeepSpeed's own keys, and our section's common options and the method's options.

    Raises:
        ConfigurationError: there is no section of ours, or it is wrong.
    """
    if not isinstance(config.get(SECTION), dict):
        raise ConfigurationError(f'{name}: there is no section "{SECTION}"; without one call deepspeed.initialize')
    theirs = {key: value for key, value in config.items() if key != SECTION}
    given = dict(config[SECTION])
    where = f'{name}, "{SECTION}"'
    common = {key: given.pop(key) for key in list(given) if key in Section.model_fields}
    method = given.get("method", "local_sgd")
    if not isinstance(method, str) or method not in methods.METHODS:
        raise ConfigurationError(f'{where}: "method": {method!r} is none of {", ".join(sorted(methods.METHODS))}')
    section = checked(Section, common, where)
    return theirs, section, methods.parse(methods.METHODS[method], given, where, also_known=Section.model_fields)


def check(config: dict[str, Any], options: MethodOptions, section: Section, name: str) -> None:
    """Checks for keys of DeepSpeed that do not go with workers that exchange parameters.

    Raises:
        ConfigurationError: there is such a key; names it.
    """
    zero = _object(config, "zero_optimization", name)
    stages = _STAGES[options.method]
    if zero.get("stage", 0) not in stages:
        known = " and ".join(filter(None, [", ".join(map(str, stages[:-1])), str(stages[-1])]))
        raise ConfigurationError(
            f'{name}: "zero_optimization": "stage" {zero["stage"]!r} is not supported with method {options.method}; '
            f"{known} are"
        )
    unused = ("offload_optimizer",) if options.method == "hybrid_async" else ()  # there is none on the worker
    for key in ("offload_optimizer", "offload_param"):
        device = _object(zero, key, name).get("device", "none")
        if device not in (("none", "cpu") if options.method == "local_sgd" or key in unused else ("none",)):
            raise ConfigurationError(
                f'{name}: "zero_optimization": "{key}" to {device} is not supported with method {options.method}; '
                "leave it out"
            )
    _check_whole_steps(zero, name)
    for key in (*_HALF_PRECISION, "torch_autocast"):
        enabled = _object(config, key, name).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ConfigurationError(f'{name}: "{key}": "enabled" is {enabled!r}: give true or false')
    if _object(config, "tensor_parallel", name).get("autotp_size", 0) not in (0, 1):
        raise ConfigurationError(
            f'{name}: "tensor_parallel" is not supported with "{SECTION}": every rank must have the whole model, or '
            'its part by "zero_optimization"; leave it out'
        )
    for key in ("pipeline", "compression_training", "hybrid_engine"):
        if _object(config, key, name).get("enabled", key == "pipeline" and key in config):
            raise ConfigurationError(f'{name}: "{key}" is not supported with "{SECTION}"; leave it out')
    if str(config.get("gradient_allreduce_op")).lower() == "sum":
        raise ConfigurationError(
            f'{name}: "gradient_allreduce_op": "sum" is not supported with "{SECTION}": between workers gradients are '
            "averaged; leave it out, and divide each loss by its own samples, not by those of all ranks"
        )
    autocast = _object(config, "torch_autocast", name)
    if zero.get("stage", 0) and autocast.get("enabled", False) and autocast.get("dtype") in _FLOAT16:
        raise ConfigurationError(
            f'{name}: "torch_autocast" in float16 is not supported with "zero_optimization", under which DeepSpeed '
            'never lowers the loss scale: give "dtype": "bfloat16", or "stage": 0'
        )
    if options.method == "hybrid_async":
        _check_hybrid(config, name)
        if options.micro_batches > 1:
            raise ConfigurationError(
                f'{name}: "micro_batches" is what DeepSpeed has as "gradient_accumulation_steps": give that'
            )
    check_ranks(options, section.island_size, name)


BF16 = ("bf16", "bfloat16")  # which is DeepSpeed's older name of it
_HALF_PRECISION = ("fp16", *BF16, "amp")
_FLOAT16 = ("float16", "torch.float16", "fp16", "half")  # DeepSpeed's names of it
_BFLOAT16 = ("bfloat16", "torch.bfloat16", "bf16")
FLOAT32 = ("float32", "torch.float32", "fp32", "float")
_STAGES = {"local_sgd": (0, 1, 2, 3), "hybrid_async": (0, 1, 2, 3), "adasum": (0, 1, 2), "adascale": (0, 1, 2)}
_REASON = ", whose optimizer steps in the server"


def _check_whole_steps(zero: dict[str, Any], name: str) -> None:
    """Checks for keys with which DeepSpeed steps part of the parameters at another time than its engine does: an
    exchange between would take such steps back."""
    super_offload = _object(zero, "offload_optimizer", name).get("super_offload", False)
    for key, used in (("zenflow", zero.get("zenflow") is not None), ("super_offload", super_offload)):
        if used:
            raise ConfigurationError(
                f'{name}: "zero_optimization": "{key}" is not supported with "{SECTION}": it steps beside the '
                "engine; leave it out"
            )


def _check_hybrid(config: dict[str, Any], name: str) -> None:
    """Checks for keys that do not go with hybrid_async, which steps in the server, in fp32, on whole gradients."""
    reason = f"is not supported with method hybrid_async{_REASON}; local_sgd has it"
    masters = [(section, "bf16_master_weights_and_grads") for section in BF16]
    masters.append(("fp16", "fp16_master_weights_and_grads"))
    for section, key in (("fp16", "auto_cast"), *masters):
        if _object(config, section, name).get(key, False):
            raise ConfigurationError(f'{name}: "{section}": "{key}" {reason}')
    autocast = _object(config, "torch_autocast", name)
    if autocast.get("enabled", False) is True and autocast.get("dtype") not in _BFLOAT16:
        raise ConfigurationError(f'{name}: "torch_autocast" in float16 {reason}; or give "dtype": "bfloat16"')
    for key in ("fp16", "torch_autocast") if _object(config, "zero_optimization", name).get("stage", 0) == 3 else ():
        if _object(config, key, name).get("enabled", False):
            raise ConfigurationError(
                f'{name}: "{key}" with "zero_optimization": "stage": 3 is not supported with method hybrid_async: give '
                '"bf16", or "stage": 0, which has the same memory for moments'
            )
    if _object(config, "zero_optimization", name).get("stage", 0) != 3:
        _check_sums(config, name)
    schedule = config.get("scheduler")
    if isinstance(schedule, dict) and schedule.get("type") == "OneCycle":
        params = schedule.get("params")
        if isinstance(params, dict) and params.get("cycle_momentum", True):
            raise ConfigurationError(
                f'{name}: "scheduler": "params": "cycle_momentum", which is true by default, {reason}; or give false'
            )


def _check_sums(config: dict[str, Any], name: str) -> None:
    """Checks that micro-batches are to be added up in the model's type, or in fp32 where this torch can do so."""
    kind = _object(config, "data_types", name).get("grad_accum_dtype")
    types = dict.fromkeys(BF16, _BFLOAT16) | {"fp16": _FLOAT16}
    own = next((each for key, each in types.items() if _object(config, key, name).get("enabled", False)), FLOAT32)
    if kind is None or kind in own or (kind in FLOAT32 and hasattr(Tensor, "grad_dtype")):
        return
    old = "with this version of torch, which has no Tensor.grad_dtype"
    why = old if kind in FLOAT32 else f"of a model in {own[0]}"
    other = "" if own is _FLOAT16 else ', or give "zero_optimization": {"stage": 3}'  # which is not for fp16
    raise ConfigurationError(
        f'{name}: "data_types": "grad_accum_dtype" {kind!r} is not supported with method hybrid_async {why}: leave it '
        f"out{other}"
    )


def _object(config: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """Returns a section of the configuration; an empty one if there is none."""
    section = config.get(key)
    if section is not None and not isinstance(section, dict):
        raise ConfigurationError(f'{name}: "{key}" is {section!r}: it must be an object, as in {{"key": value}}')
    return section or {}


def check_group(section: Section, method: str, name: str) -> None:
    """Checks for keys about a server, which a synchronous method does not need: all its ranks are one group.

    Raises:
        ConfigurationError: there is such a key; names it.
    """
    of_a_server = section.model_fields_set - {"run_dir"}  # which a script may set for whatever method
    if of_a_server:
        key = min(of_a_server)
        raise ConfigurationError(f'{name}: "{key}" is of no use with method {method}, which has no server')


def own_monitor(config: dict[str, Any], worker: int) -> dict[str, Any]:
    """Returns the configuration with this worker's own monitors.

    Every worker takes itself for rank 0, so all but worker 0 write under a name of their own, or not at all.
    """
    if worker == 0:
        return config
    monitors = {key: dict(config[key]) for key in ("tensorboard", "csv_monitor", "wandb", "comet") if key in config}
    for key, monitor in monitors.items():
        if key in ("wandb", "comet"):
            monitor["enabled"] = False
        else:
            monitor["job_name"] = f"{monitor.get('job_name', 'DeepSpeedJobName')}-worker{worker}"
    return config | monitors


def without_file(args: Any) -> Any:
    """Returns the arguments without ``deepspeed_config``: DeepSpeed takes one configuration, and gets a dictionary."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    return Namespace(**vars(args) | {"deepspeed_config": None})
