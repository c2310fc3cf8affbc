"""The parameters and gradients of a model and its optimizer that are exchanged."""

import inspect
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol.sketches import sketch_of
from fairseq_async.pytorch.fsdp import check_divided, norm_of_parts, reshard
from fairseq_async.server.optimizers.torch_optimizer import check_of_model
from fairseq_async.worker.async_worker import AsyncWorker

_NORMALISATIONS = (_NormBase, _SpectralNorm)
_HALF = (torch.bfloat16, torch.float16)
_COMPILED = "_orig_mod."  # before each name in a model that torch.compile has wrapped


def exchanged_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer], types: Collection[torch.dtype], ranks: int
) -> list[tuple[str, Parameter]]:
    """Returns the model's trainable parameters that the optimizers step, with their names, in the model's order.

    Args:
        types: those that a parameter may have.
        ranks: of this worker.

    Raises:
        ConfigurationError: the optimizers have others, or one parameter twice, or the model cannot be exchanged.
    """
    reshard(model)
    check_memory(model, may_be_divided=True)
    stepped = set[int]()
    for optimizer in optimizers:
        of_one = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        if twice := stepped & set(map(id, of_one)):
            name = next((name for name, each in model.named_parameters() if id(each) in twice), "a parameter")
            raise ConfigurationError(f"{name} is in two optimizers: leave it to one of them")
        stepped |= set(map(id, of_one))
    named = [(name.replace(_COMPILED, ""), each) for name, each in model.named_parameters() if id(each) in stepped]
    for optimizer in optimizers:
        check_of_model(optimizer, named)
    if not named:
        raise ConfigurationError("the optimizer has no parameter of the model that is trained")
    check_divided(named, ranks)
    for name, parameter in named:
        if parameter.dtype not in types:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigurationError(f"{name} is {kind}: keep parameters in float32, and compute under torch.autocast")
    return named


def check_memory(model: nn.Module, may_be_divided: bool = False) -> None:
    """Checks that each parameter has elements of its own, in memory that can be exchanged.

    Args:
        may_be_divided: whether each rank may have a part of a parameter, as with FSDP2.

    Raises:
        ConfigurationError: a parameter is lazy, on ``meta``, sparse or complex, or shares its storage with another.
    """
    ranges: list[tuple[int, int, str]] = []
    for name, each in model.named_parameters():
        if isinstance(each, DTensor) and not may_be_divided:
            raise ConfigurationError(
                f'{name} is a DTensor, of which each rank has a part: divide the model by "zero_optimization" instead'
            )
        if is_lazy(each):
            raise ConfigurationError(f"{name} is lazy and has no shape yet: compute one batch with the model before")
        if each.is_meta:
            raise ConfigurationError(f"{name} is on meta and has no values: call to_empty() and load them before")
        if each.layout is not torch.strided:
            raise ConfigurationError(f"{name} is a sparse tensor: make it dense, by to_dense()")
        if each.is_complex() and each.requires_grad:
            raise ConfigurationError(f"{name} is complex: keep its real and imaginary parts, by torch.view_as_real()")
        if each.numel() and each.requires_grad and not isinstance(each, DTensor):
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            ranges.append((each.data_ptr(), each.data_ptr() + (last + 1) * each.element_size(), name))
    for (_, end, name), (start, _, other) in pairwise(sorted(ranges)):
        if start < end:
            raise ConfigurationError(
                f"{other} shares its memory with {name}: give both modules one Parameter (a.weight = b.weight), or "
                "copies of their own"
            )


def one_model(models: Sequence[nn.Module]) -> nn.Module:
    """Returns the model; of several, a module that has all of them, in which names begin with a model's number.

    Raises:
        ConfigurationError: something else than modules was given.
    """
    for each in models:
        if not isinstance(each, nn.Module):
            raise ConfigurationError(
                f"model is a {type(each).__name__}: give a torch.nn.Module, or a list of them, and then its optimizer"
            )
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def check_optimizers(optimizers: Sequence[Optimizer], ranks: int) -> None:
    """Checks that these are torch's optimizers, step without a closure, and for this worker alone.

    Args:
        ranks: of this worker.

    Raises:
        ConfigurationError: one is something else, as LBFGS is, or there is none.
    """
    if not optimizers:
        raise ConfigurationError("optimizer is an empty list: give at least one")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigurationError(
                f"optimizer is a {type(each).__name__}: give a torch.optim.Optimizer, or a list of them"
            )
        hooks = getattr(each, "_optimizer_step_pre_hooks", None)  # accelerate's wrapper says that it is an Optimizer
        if hooks is None or hooks is getattr(getattr(each, "optimizer", None), "_optimizer_step_pre_hooks", None):
            raise ConfigurationError(
                f"optimizer is a {type(each).__name__}, which wraps another: give that one, optimizer.optimizer"
            )
        if type(each).__name__ == "ZeroRedundancyOptimizer" and ranks == 1:  # each rank steps its part for all others
            raise ConfigurationError(
                "optimizer is a ZeroRedundancyOptimizer, which divides each step among the ranks of torch.distributed, "
                "so that one worker's gradients would be another's: give the optimizer that it wraps, of all parameters"
            )
        closure = inspect.signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigurationError(
                f"optimizer is {type(each).__name__}, whose step() computes the loss several times, by a closure: in a "
                "run the gradients are computed before the step; use another optimizer"
            )


def check_exchanged(
    model: nn.Module, exchanged: Collection[int], remedy: str, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Checks that no parameter has a gradient that the run does not exchange. Each worker would train its own copy.
    A gradient that was left in a frozen parameter of the model is none.

    Args:
        exchanged: the ``id`` of each parameter that is exchanged.
        remedy: says how such a parameter becomes one of them.
        optimizers: those that the script has made; none where the model's parameters are all that is trained.

    Raises:
        ConfigurationError: a parameter of the model or of an optimizer has one.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    for parameter in chain((each for each in model.parameters() if each.requires_grad), *groups):
        if parameter.grad is not None and id(parameter) not in exchanged:
            name = next((name for name, each in model.named_parameters() if each is parameter), "")
            if any(each is parameter for each in chain(*groups)):
                remedy = "give it to the optimizer, trainable, before the run begins, and freeze it then until its time"
            raise ConfigurationError(
                f"{name or f'a parameter of shape {tuple(parameter.shape)}'} has a gradient and is not exchanged: it "
                f"was in no optimizer of the run, frozen, or not there when the run began; {remedy}, or freeze it with "
                "requires_grad_(False)"
            )


def note_untrained(worker: AsyncWorker, model: nn.Module, exchanged: Collection[int], restored: bool = False) -> None:
    """Notes checksums of what every worker makes or loads by itself, for the server to compare when the worker joins.

    They are of the parameters that are not exchanged, such as frozen layers, with the scales of bitsandbytes'
    quantised ones, and of the buffers that the model saves, such as masks and random features. Left out are what ZeRO 3
    or FSDP2 has divided, and buffers that training changes: those of normalisations, single values such as counts, and
    all where the run goes on. Of buffers that it does not save, such as rotary tables, which another CPU may round
    otherwise, it notes sketches.

    Args:
        exchanged: the ``id`` of each parameter that is exchanged.
        restored: whether this worker brings the state of an earlier run.
    """
    whole = (each for each in model.parameters() if not (hasattr(each, "ds_id") or isinstance(each, DTensor)))
    frozen = [each for each in whole if id(each) not in exchanged]
    worker.details.untrained = f"{crc_of(chain(frozen, _scales(model, exchanged))):08x}" if frozen else ""
    own = {segment.name for segment in worker.replica.layout.segments if segment.is_buffer}
    if restored:
        return
    buffers = [buffer for name, buffer in _fixed_buffers(model, saved=True) if name not in own]
    worker.details.buffers = f"{crc_of(buffers):08x}" if buffers else ""
    worker.details.unsaved = {
        f"{name} {tuple(buffer.shape)}": sketch_of(buffer)
        for name, buffer in _fixed_buffers(model, saved=False)
        if buffer.is_floating_point() or buffer.is_complex()
    }


def _fixed_buffers(model: nn.Module, saved: bool) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            asked = (name not in module._non_persistent_buffers_set) is saved
            if asked and not (buffer.is_meta or is_lazy(buffer) or isinstance(module, _NORMALISATIONS)):
                if buffer.numel() > 1:
                    yield f"{prefix}.{name}".lstrip(".").replace(_COMPILED, ""), buffer


def _scales(model: nn.Module, exchanged: Collection[int]) -> Iterator[Tensor]:
    """Yields what bitsandbytes saves of its modules: scales too, which are neither parameters nor buffers."""
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes"):
            saved = module.state_dict(keep_vars=True).values()
            yield from (each for each in saved if isinstance(each, Tensor) and id(each) not in exchanged)


def crc_of(tensors: Iterable[Tensor]) -> int:
    """Returns the CRC-32 of the tensors' values, in their order."""
    crc = 0
    for each in tensors:
        if hasattr(each, "__tensor_flatten__"):  # of several tensors, as torchao's quantised ones
            crc = zlib.crc32(b"%08x" % crc_of(getattr(each, name) for name in each.__tensor_flatten__()[0]), crc)
        else:
            data = each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            crc = zlib.crc32(data, crc)
    return crc


def step_gradients(named: list[tuple[str, Parameter]]) -> list[Tensor]:
    """Returns the gradients of a step; an empty list if none was computed.

    Raises:
        ConfigurationError: a gradient is sparse.
    """
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigurationError(f"the gradient of {name} is sparse: make the layer without sparse=True")
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


def drop_gradients(named: list[tuple[str, Parameter]]) -> None:
    """Makes the optimizer's coming step one that changes nothing: torch's optimizers pass over what has no gradient."""
    for _, parameter in named:
        parameter.grad = None


def l2_norm(gradients: list[Tensor]) -> float:
    """Returns the L2 norm of all gradients together, in fp32; not finite if a gradient has NaN or Inf. Of DTensors, all
    ranks of the worker must ask together."""
    if gradients and isinstance(gradients[0], DTensor):
        return norm_of_parts(gradients)
    if all(gradient.dtype not in _HALF for gradient in gradients):
        return float(torch.nn.utils.get_total_norm(gradients))
    return float(torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]).norm())


def is_skipped_by_scaler(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer is about to skip its step, as ``torch.amp.GradScaler`` has told it."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
