"""What this plugin needs of DeepSpeed beyond its documented interface, and a check that a DeepSpeed has it.

All undocumented attributes of DeepSpeed's optimizers, parameters and engines are read or set here, as DeepSpeed 0.19
has them; the engines of this plugin override ``_take_model_step``.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.worker.changes import OtherModels
from fairseq_async.worker.start import world

# A torch optimizer, or one of DeepSpeed's wrappers of it. The wrappers have neither type hints nor a base class that
# declares the attributes which are read here.
DeepSpeedOptimizer: TypeAlias = Any
_Engine = TypeVar("_Engine", bound=DeepSpeedEngine)

MADE_FOR = "0.19.8"  # the version that setup.py names

# Attributes of the engine: the methods that our subclasses override, and what those overrides read or count.
ENGINE = (
    "_backward_epilogue",
    "_backward_prologue",
    "_global_grad_norm",
    "_report_progress",
    "_step_applied",
    "_take_model_step",
    "basic_optimizer",
    "global_rank",
    "global_samples",
    "global_steps",
    "losses",
    "lr_scheduler",
    "module",
    "monitor",
    "optimizer",
    "skipped_steps",
)
# Attributes of DeepSpeed's optimizers, by class: where the gradients of a step and the fp32 masters are.
OPTIMIZERS = {
    "DeepSpeedZeroOptimizer": (
        "_link_all_hp_params",
        "averaged_gradients",
        "bit16_groups",
        "check_grad_overflow",
        "round_robin_bit16_groups",
    ),
    "DeepSpeedZeroOptimizer_Stage3": ("_get_fp32_opt_state_partition",),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_gradients"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}
_LIBRARIES = {"deepspeed", "torch", "pydantic", *sys.stdlib_module_names}


def check_attributes(engine: DeepSpeedEngine) -> None:
    """Checks that engine and optimizer have all attributes that this plugin reads or overrides.

    Raises:
        ConfigurationError: DeepSpeed is of another version, which lacks an attribute; names both.
    """
    _check(engine, "DeepSpeedEngine", ENGINE)
    optimizer = engine.optimizer
    for base in type(optimizer).__mro__:
        _check(optimizer, base.__name__, OPTIMIZERS.get(base.__name__, ()))


def _check(owner: object, class_name: str, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ConfigurationError(
            f"DeepSpeed {deepspeed.__version__} has no {class_name}.{missing[0]}, which this plugin needs: install "
            f"deepspeed=={MADE_FOR}"
        )


def keeps_parts_of_gradients(optimizer: DeepSpeedOptimizer) -> bool:
    """Whether this is the optimizer of ZeRO 1 and 2, which drops ``.grad`` and keeps this rank's reduced parts.

    In bf16 with fp32 sums of gradients, ZeRO 1 has another, BF16_Optimizer, which keeps whole gradients on each rank.
    """
    return hasattr(optimizer, "averaged_gradients")


def keeps_gradients_apart(optimizer: DeepSpeedOptimizer) -> bool:
    """Whether the gradients that the optimizer steps with are not the parameters' ``.grad``."""
    return keeps_parts_of_gradients(optimizer) or isinstance(optimizer, BF16_Optimizer)


def optimizer_gradients(optimizer: DeepSpeedOptimizer) -> list[list[Tensor]]:
    """Returns this rank's gradients of the coming step, for each parameter group of an optimizer with fp32 masters."""
    if keeps_parts_of_gradients(optimizer):
        return [list(parts or []) for _, parts in sorted(optimizer.averaged_gradients.items())]
    if isinstance(optimizer, BF16_Optimizer):
        # the fp32 accumulators that it steps with, in place of the parameters' bf16 .grad
        return [list(parts) for parts in optimizer.fp32_groups_gradients]
    return [[each.grad for each in group if each.grad is not None] for group in low_precision_groups(optimizer)]


def low_precision_groups(optimizer: DeepSpeedOptimizer) -> list[list[Tensor]]:
    """Returns the model's parameters by group if the optimizer's own groups hold fp32 masters, else an empty list.

    The attribute is ``bit16_groups`` in ZeRO, ``bf16_groups`` in BF16_Optimizer, ``fp16_groups`` in fp16 without ZeRO.
    """
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return []


def has_master_in_partition(parameter: Tensor) -> bool:
    """Whether :func:`master_in_partition` can be asked for the parameter: with ZeRO 1 and 2, and in bf16."""
    return hasattr(parameter, "_hp_mapping")


def master_in_partition(parameter: Tensor) -> tuple[int, Tensor] | None:
    """Returns the first element's index and the master of this rank's part of a parameter; None if it has no part.

    For ZeRO 1, 2 and bf16.
    """
    # the one link from a parameter to its slice of the flat master; safe_get_full_fp32_param goes the same way
    mapping = getattr(parameter, "_hp_mapping")  # noqa: B009 - torch's type hints do not know DeepSpeed's attribute
    return None if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)


def link_masters(optimizer: DeepSpeedOptimizer) -> None:
    """Links the parameters of ZeRO 1 and 2 to their masters anew where ``"round_robin_gradients"`` has dealt them to
    the ranks: DeepSpeed 0.19.8 lays their masters in the order dealt, and links them as if that were the model's."""
    if not getattr(optimizer, "round_robin_gradients", False):
        return
    in_order, optimizer.bit16_groups = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
    optimizer._link_all_hp_params()
    optimizer.bit16_groups = in_order


def fp16_masters(optimizer: DeepSpeedOptimizer) -> dict[int, Tensor]:
    """Returns the flat fp32 master of each parameter, by the parameter's ``id``, for fp16 without ZeRO."""
    masters: dict[int, Tensor] = {}
    for index, group in enumerate(getattr(optimizer, "fp16_groups", [])):
        if hasattr(optimizer, "fp32_groups_flat"):  # the fused optimizer has one flat master for a group
            flats = optimizer.fp32_groups_flat[index].split([parameter.numel() for parameter in group])
        else:  # the unfused optimizer has one for each parameter
            flats = [master.view(-1) for master in optimizer.fp32_groups[index]]
        masters |= {id(parameter): flat for parameter, flat in zip(group, flats, strict=True)}
    return masters


def check_whole_model(engine: DeepSpeedEngine) -> None:
    """Checks that a model is not divided among ranks by other means than ZeRO: an exchange takes rank 0's parameters
    for those of all.

    Raises:
        ConfigurationError: the model is divided.
    """
    divided = 'every rank must have the whole model, or its part by "zero_optimization"'
    if engine.mp_world_size > 1:
        raise ConfigurationError(f'model parallelism (mpu=, "tensor_parallel") is not supported: {divided}')
    for name, module in engine.module.named_modules():
        if getattr(module, "ep_size", 1) > 1:
            raise ConfigurationError(f"{name}: ep_size is {module.ep_size}: {divided}; give ep_size=1")


def round_model(engine: DeepSpeedEngine, kind: torch.dtype) -> None:
    """Rounds the model as DeepSpeed does in half precision: parameters, and buffers if the configuration says so.

    Raises:
        ConfigurationError: the device does not compute in this type.
    """
    if kind not in deepspeed.get_accelerator().supported_dtypes():
        raise ConfigurationError(f'{str(kind).removeprefix("torch.")} is not supported on this device: give "bf16"')
    if not hasattr(engine, "_cast_module_mixed_precision"):  # before 0.19.2
        engine.module.to(kind)  # buffers, too
        return
    from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern

    kept = keep_in_fp32_pattern(engine.module, engine._config.keep_in_fp32_modules, kind)
    _, buffers = engine._mixed_precision_dtypes()
    engine._cast_module_mixed_precision(kind, buffers, False, kept)


def restore_fp16(engine: DeepSpeedEngine, section: dict[str, Any]) -> None:
    """Restores the section "fp16", without which the engine was made, for what scripts ask the engine about it, such as
    ``loss_scale()``. Whether the model is in half precision, the engine's own methods say."""
    engine._config.float16_config = DeepSpeedFP16Config(**section)


def accumulate_in_fp32(engine: DeepSpeedEngine) -> None:
    """Makes backward add the gradients of micro-batches up in fp32, in whatever type the parameters are."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def fill_gradients(engine: DeepSpeedEngine) -> None:
    """Gives parameters without a gradient one of zeros, in the type of their sums: DeepSpeed's own, which it makes to
    reduce the same on all ranks, are of the parameter's type, which torch then refuses."""
    for parameter in engine.module.parameters():
        if parameter.grad is None and getattr(parameter, "grad_dtype", parameter.dtype) is not parameter.dtype:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def refresh_masters(engine: DeepSpeedEngine) -> None:
    """Sets the fp32 masters to the model's parameters, after a checkpoint was loaded without its optimizer.

    With ZeRO, DeepSpeed does so itself; without, it leaves the masters as they were.
    """
    if hasattr(engine.optimizer, "refresh_fp32_params") and not engine.zero_optimization():
        engine.optimizer.refresh_fp32_params()


def check_overflow_always(optimizer: DeepSpeedOptimizer) -> None:
    """Makes ZeRO check each step for NaN and Inf, in every type; by itself it never does so in fp32."""
    if hasattr(optimizer, "check_grad_overflow"):  # DeepSpeed's configuration has a key for bf16 only
        optimizer.check_grad_overflow = True


def loss_scale_of(engine: DeepSpeedEngine) -> float:
    """Returns the loss scale that is in the gradients before a step: ``cur_scale`` of a ZeRO optimizer in fp16, that of
    the scaler of torch's autocast in float16, or 1.

    Without ZeRO, DeepSpeed 0.19 does not multiply the loss in fp16, although its optimizer has a scale.
    """
    if engine.fp16_enabled():
        return float(getattr(engine.optimizer, "cur_scale", 1.0))
    scaler = _gradient_scaler(engine)
    return 1.0 if scaler is None else float(scaler.get_scale())


def may_overflow(engine: DeepSpeedEngine) -> bool:
    """Whether NaN or Inf may be due to a loss scale that is still to fall. DeepSpeed itself ends a run in fp16 whose
    scale can fall no further."""
    return engine.fp16_enabled() or loss_scale_of(engine) > 1.0


def lower_loss_scale(engine: DeepSpeedEngine) -> None:
    """Lowers the scale of torch's autocast in float16, as its scaler does for a step with NaN or Inf that it leaves out
    itself. Where all ranks call this, their scales stay equal, although the scaler of some has seen no NaN or Inf."""
    scaler = _gradient_scaler(engine)
    if scaler is not None:
        scaler.update(scaler.get_scale() * scaler.get_backoff_factor())


def _gradient_scaler(engine: DeepSpeedEngine) -> torch.amp.GradScaler | None:
    """The scaler of torch's autocast in float16 without ZeRO, if the engine has one."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the whole shape of a parameter in ZeRO 3, which has no elements of its own between two steps."""
    return tuple(getattr(parameter, "ds_shape"))  # noqa: B009 - torch's type hints do not know DeepSpeed's attribute


def listed(parameters: Any) -> Any:
    """Returns parameters with a list in place of a generator, which DeepSpeed would exhaust."""
    return list(parameters) if isinstance(parameters, Iterator) else parameters


def copied_groups(parameters: Any) -> list[Any]:
    """Returns a copy of ``model_parameters=``, in whose groups ZeRO 3 writes."""
    given = (dict(each) if isinstance(each, dict) else each for each in parameters or ())
    return [each | {"params": listed(each["params"])} if isinstance(each, dict) else each for each in given]


def optimizer_of_whole(
    engine: DeepSpeedEngine, section: dict[str, Any], parameters: Sequence[Any]
) -> torch.optim.Optimizer:
    """Makes the optimizer of the configuration anew, over whole parameters: ZeRO 3 has given the engine's own
    partitions, whose moments this drops.

    Args:
        section: ``"optimizer"`` of the configuration.
        parameters: the model's, or groups of them.
    """
    engine._config.optimizer_params = dict(section.get("params") or {})  # older versions take keys out of it
    engine.basic_optimizer.state.clear()
    made: torch.optim.Optimizer = engine._configure_basic_optimizer(parameters)
    return made


def drop_partitions(engine: DeepSpeedEngine) -> None:
    """Drops the gradients of a step that ZeRO 3 has divided, as its own step does."""
    if engine.zero_optimization_partition_weights():
        optimizer = engine.optimizer
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(1.0)


def refuse_other_steps(engine: _Engine, workers: int, is_expected: Callable[[_Engine], bool]) -> None:
    """From now on, ends the process with one line where the script itself steps the optimizer within DeepSpeed's
    wrappers, or another optimizer that has parameters of the engine's model: the run would not see the step. An
    optimizer of other parameters is named in a warning where there are several workers.

    Args:
        is_expected: whether a step that is about to be taken is the engine's own.
    """
    named = {id(each): name for name, each in engine.module.named_parameters() if each.requires_grad}
    others = OtherModels(workers, "give the engine one module that has these, too")
    reference = weakref.ref(engine)  # with the engine its parameters go, and others may get their ids

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if (of := reference()) is None or is_expected(of):
            return
        given = (each for group in optimizer.param_groups for each in group["params"])
        names = [named[id(each)] for each in given if id(each) in named]
        if names or optimizer is of.basic_optimizer:
            what = f"{names[0]} in the step() of " if names else "the step() of "
            fail(
                f"the script trains {what}{type(optimizer).__name__}, and the run sees the steps of engine.step() "
                "alone: call engine.step() instead"
            )
        others.count(optimizer)

    register_optimizer_step_pre_hook(check)


def count_step(engine: DeepSpeedEngine, applied: bool) -> None:
    """Counts a step in which DeepSpeed's own ``_take_model_step`` did not run, as that does at its end."""
    engine._step_applied = applied  # what its was_step_applied() answers
    engine.losses = None
    engine.global_steps += 1
    samples = engine.train_batch_size()
    if not manages_accumulation(engine):  # by the script, in micro-batches of which DeepSpeed has the count
        samples = samples // engine.gradient_accumulation_steps() * engine._unmanaged_backward_count
        engine._unmanaged_backward_count = 0
    engine.global_samples += samples
    every = engine.steps_per_print()
    if every is not None and engine.global_rank == 0 and engine.global_steps % every == 0:
        engine._report_progress(engine.global_steps)


def manages_accumulation(engine: DeepSpeedEngine) -> bool:
    """Whether the engine itself says where a step ends; before 0.19.2 it always does."""
    return not hasattr(engine, "managed_gradient_accumulation") or bool(engine.managed_gradient_accumulation())


def is_raised_by_script(error: BaseException) -> bool:
    """Whether an error was raised in, or below, a function of the script's that DeepSpeed has called, and not by
    DeepSpeed or the libraries that it uses. Call it where the error is caught."""
    _, *inner = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    return any(name.partition(".")[0] not in _LIBRARIES for name in inner)


def is_raised_by_optimizer(error: BaseException) -> bool:
    """Whether a torch optimizer has raised an error where it was given a state."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "load_state_dict" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        for frame in frames
    )


def check_not_started() -> None:
    """Checks that nothing has initialised torch.distributed with every rank in it; raises a ConfigurationError."""
    if dist.is_initialized():
        unlink_reduction_buffer()  # now, while every rank is here: the launcher kills those that are slower to end
    world.check_not_started(
        "call fairseq_async.deepspeed_plugin.initialize before anything that does so (deepspeed.init_distributed, for "
        "one); with Trainer or accelerate, call attach and make TrainingArguments or DeepSpeedPlugin before that"
    )


def unlink_reduction_buffer() -> None:
    """Removes the name of DeepSpeed's reduction buffer of this rank from /dev/shm; the memory stays in use.

    DeepSpeed opens the buffer in ``init_distributed`` on CPUs and never removes it: 66 MiB for each rank of each run.
    Collective: every rank of the world calls it after ``init_distributed``. The barrier is needed, since a rank opens
    the others' buffers by name.
    """
    dist.barrier()
    get = os.environ.get
    world = f"{os.getuid()}_{get('MASTER_ADDR')}_{get('MASTER_PORT')}"
    (Path("/dev/shm") / f"deepspeed_allreduce_buffer_{world}_{dist.get_rank()}").unlink(missing_ok=True)
