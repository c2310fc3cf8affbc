"""The optimizer of a ``hybrid_async`` run: what workers say of theirs, and the equal one that the server steps."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, cast

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.algorithms.hybrid import pieces
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject
from fairseq_async.server import Layout

Kind = Literal["Adam", "AdamW", "SGD"]
# Each of them steps every element by itself, so a group may be stepped in pieces of a flat vector.
_CLASSES: dict[Kind, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
}
_OF_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
# What of a group changes its steps; the rest says how they are computed, or is the script's own.
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "Adam": _OF_ADAM,
    "AdamW": _OF_ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
}
_TYPES = "Adam, AdamW, SGD, FusedAdam and DeepSpeedCPUAdam"
_STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(_STRICT)
@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group of an optimizer.

    Attributes:
        parameters: their numbers in the layout that server and workers share.
        options: of the group, as torch's optimizer names them.
    """

    parameters: list[Annotated[int, Field(ge=0)]]
    options: dict[str, bool | float | list[float]]


@with_config(_STRICT)
@dataclass(frozen=True)
class OptimizerDescription:
    """An optimizer by the name of torch's class, with its parameter groups in their order."""

    type: Kind
    groups: list[ParameterGroup]


def describe(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Tensor]]) -> JsonObject:
    """An optimizer that has not stepped yet, for the server.

    Args:
        named: the parameters of the layout, in its order.

    Raises:
        ConfigurationError: the server has none that takes the same steps.
    """
    kind = _kind(optimizer)
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    groups = [_describe_group(group, _OPTIONS[kind], numbers) for group in optimizer.param_groups]
    return asdict(OptimizerDescription(kind, groups))


def build(description: JsonObject, layout: Layout, flat: Tensor) -> torch.optim.Optimizer:
    """The optimizer over the flat parameters; its groups are those of the description, in their order.

    Raises:
        ConfigurationError: no worker of this version describes an optimizer so.
    """
    try:
        described = TypeAdapter(OptimizerDescription).validate_json(json.dumps(description))  # strict types are JSON's
        unknown = {name for group in described.groups for name in group.options} - set(_OPTIONS[described.type])
        if unknown:
            raise ValueError(f"{described.type} has no {min(unknown)}")
        sizes = [segment.size for segment in layout.segments]
        groups = [
            {"params": [piece for run in _runs(group.parameters, sizes, flat) for piece in pieces(run)]}
            | {name: tuple(given) if isinstance(given, list) else given for name, given in group.options.items()}
            for group in described.groups
        ]
        return cast(Any, _CLASSES[described.type])(groups)
    except (ValidationError, ValueError, TypeError, IndexError) as error:
        said = " ".join(str(error).split())
        raise ConfigurationError(f"the description of the optimizer cannot be used: {said}") from error


def _kind(optimizer: torch.optim.Optimizer) -> Kind:
    """Which of torch's optimizers takes the same steps.

    Raises:
        ConfigurationError: none that the server has.
    """
    name = type(optimizer).__name__
    if type(optimizer) is torch.optim.SGD:
        return "SGD"
    if type(optimizer) in (FusedAdam, DeepSpeedCPUAdam):
        decoupled = [bool(vars(optimizer)["adam_w_mode"])]
        if not all(group["bias_correction"] for group in optimizer.param_groups):
            raise ConfigurationError(f"{name} with bias_correction False has no equal in the server; leave that out")
    elif type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        is_adamw = type(optimizer) is torch.optim.AdamW
        decoupled = [is_adamw or group.get("decoupled_weight_decay", False) for group in optimizer.param_groups]
    else:
        raise ConfigurationError(f"the optimizer {name} has no equal in the server; use one of {_TYPES}")
    if len(set(decoupled)) > 1:
        raise ConfigurationError(f"{name}: decoupled_weight_decay differs between groups; give all the same")
    return "AdamW" if decoupled[0] else "Adam"


def _describe_group(group: dict[str, Any], names: Sequence[str], numbers: dict[int, int]) -> ParameterGroup:
    """One group; parameters that are not trained are left out of it."""
    trained = [parameter for parameter in group["params"] if parameter.requires_grad]
    if not all(id(parameter) in numbers for parameter in trained):
        raise ConfigurationError(
            "the optimizer has a parameter that is not one of the model's, which alone the server steps: make it an "
            "attribute of the model, or leave it out"
        )
    options = {name: _plain(group[name], name) for name in names if name in group}
    return ParameterGroup(sorted(numbers[id(parameter)] for parameter in trained), options)


def _plain(value: Any, name: str) -> bool | float | list[float]:
    """An option as JSON has it: torch takes numbers, tensors of one element, and pairs of either."""
    if isinstance(value, bool):
        return value
    numbers = [float(each) for each in (value if isinstance(value, tuple | list) else [value])]
    if not all(map(math.isfinite, numbers)):
        raise ConfigurationError(f'"{name}" of the optimizer is {value}: give a finite number')
    return numbers if isinstance(value, tuple | list) else numbers[0]


def _runs(numbers: Sequence[int], sizes: Sequence[int], flat: Tensor) -> Iterator[Tensor]:
    """The parts of the flat vector where these parameters lie; neighbours are one part."""
    ends = list(accumulate(sizes))
    start = end = 0
    for number in sorted(numbers):
        first = ends[number] - sizes[number]
        if first != end:  # what lies between belongs to another group
            if end > start:
                yield flat[start:end]
            start = first
        end = ends[number]
    if end > start:
        yield flat[start:end]


def check_params(kind: Kind, params: dict[str, Any]) -> None:
    """Lets torch check the values of ``"params"`` in a configuration.

    Raises:
        TypeError: an unknown or ill-typed option.
        ValueError: a value out of its range.
    """
    cast(Any, _CLASSES[kind])([Parameter(torch.zeros(1))], **params)
