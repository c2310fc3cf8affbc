"""Describes a torch optimizer in plain data, from which the server builds the same one: nothing is pickled."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypeAlias, cast

import torch
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, with_config
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from fairseq_async.algorithms.muon import Muon, MuonAdamW
from fairseq_async.algorithms.pieces import pieces
from fairseq_async.environment import PLUGINS
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.methods import plugin_modules
from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol.layout import Layout
from fairseq_async.server.optimizers.learning_rates import Rates
from fairseq_async.server.optimizers.own_class import check_own_class

# Each of these steps every element independently: a model may be stepped in pieces, by several threads.
_ELEMENTWISE: list[Any] = [Adam, AdamW, SGD, Adadelta, Adagrad, Adamax, NAdam, RAdam, RMSprop]
# These step every tensor independently, in its own shape. Muon is not in every version of torch that we take.
_OF_TENSORS: list[Any] = [getattr(torch.optim, "Adafactor", None), *([Muon, MuonAdamW] if Muon else [])]
OPTIMIZERS: dict[str, Any] = {each.__name__: each for each in _ELEMENTWISE + _OF_TENSORS if each is not None}
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # on a CPU
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not what it is
PARTS = "parts"  # the key of several optimizers' descriptions
_STRICT = ConfigDict(extra="forbid", strict=True)
_Option: TypeAlias = bool | int | float | str | list[int | float | None]


@with_config(_STRICT)
@dataclass(frozen=True)
class ParameterGroup:
    """The optimizer's options for some of the model's tensors.

    Attributes:
        tensors: their numbers in the layout.
        options: arguments of the optimizer's constructor, such as ``lr``.
    """

    tensors: list[Annotated[int, Field(ge=0)]]
    options: dict[str, _Option]


@with_config(_STRICT)
@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer that steps in the server. Worker 0 sends it; every other worker must send an equal one.

    Attributes:
        optimizer: name of the class in ``torch.optim``, or ``module:Class`` of one in a user's plugin.
        parameter_groups: the optimizer's groups, in its order. A tensor in none of them is not stepped.
        learning_rates: row n has the rate of each group after n steps; the last row stays. Empty where no table is
            needed.
        clip_norm: L2 norm to which a larger gradient is clipped before the step; 0 does not clip.
        fused: whether to step with torch's fused kernels, in one pass over memory. They round otherwise than loops do.
    """

    optimizer: str
    parameter_groups: list[ParameterGroup]
    learning_rates: Rates = field(default_factory=list)
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    fused: bool = False

    def to_json(self) -> JsonObject:
        """Returns the JSON for the ``framework`` of a :class:`~fairseq_async.method.spec.MethodSpec`."""
        return asdict(self)

    @classmethod
    def from_json(cls, framework: JsonObject) -> "OptimizerSpec":
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigurationError: ``framework`` is no description of an optimizer.
        """
        try:
            return _adapter().validate_json(json.dumps(framework))  # as JSON: strict types are JSON's
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationError(f"the description of the optimizer: {where}: {first['msg']}") from error


def parts_of(framework: JsonObject) -> list[OptimizerSpec]:
    """Returns the descriptions of several optimizers, each for some of the tensors.

    Raises:
        ConfigurationError: these are none.
    """
    parts = framework[PARTS]
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        raise ConfigurationError("the description of the optimizers is no list of descriptions")
    return [OptimizerSpec.from_json(part) for part in parts if isinstance(part, dict)]


@cache
def _adapter() -> TypeAdapter[OptimizerSpec]:
    return TypeAdapter(OptimizerSpec)


def check_of_model(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> None:
    """Checks that the optimizer trains only parameters of the model: server and workers share no others.

    Raises:
        ConfigurationError: the optimizer trains other parameters.
    """
    known = {id(tensor) for _, tensor in named}
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    others = sum(id(each) not in known for each in trained)
    if others:
        raise ConfigurationError(
            f"the optimizer has {others} parameters that are not the model's: give the module that has all of them"
        )


def describe(
    optimizer: Optimizer,
    named: Sequence[tuple[str, Tensor]],
    kind: str = "",
    rates: Rates | None = None,
    clip_norm: float = 0.0,
) -> OptimizerSpec:
    """Describes for the server an optimizer that has not stepped yet.

    Args:
        named: the tensors of the layout, in its order.
        kind: name of the class in ``torch.optim`` that takes the same steps, if the optimizer is of another class, with
            fused kernels of its own.
        rates: a table of learning rates, if they are not constant; see :class:`OptimizerSpec`.
        clip_norm: see :class:`OptimizerSpec`.

    Raises:
        ConfigurationError: the server has no such optimizer, or not all of its parameters.
    """
    name = _steps_as(optimizer)
    if not (kind or name):
        made, module = type(optimizer).__name__, type(optimizer).__module__
        own = f"{module}.{made}" if made in OPTIMIZERS else made  # as transformers' Adafactor
        raise ConfigurationError(
            f"the optimizer is {own}: the server steps with {', '.join(OPTIMIZERS)} of torch.optim and "
            f"fairseq_async.torch; give one of these, name its module, {module}, in {PLUGINS}, or use local SGD, which "
            "takes any that needs no closure"
        )
    check_of_model(optimizer, named)
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(named)}
    groups = [_describe_group(group, kind or name, numbers) for group in optimizer.param_groups]
    fused = bool(kind) or any(group.get("fused") for group in optimizer.param_groups)
    spec = OptimizerSpec(kind or name, groups, rates or [], clip_norm, fused and (kind or name) in _FUSED)
    if is_of_plugin(spec):
        check_own_class(optimizer, [tensor for _, tensor in named], partial(_make, spec))
    return spec


def is_of_plugin(spec: OptimizerSpec) -> bool:
    """Whether the class is one of a user's plugin."""
    return ":" in spec.optimizer


def _steps_as(optimizer: Optimizer) -> str:
    """Returns the name of the class whose step an optimizer takes; empty if the server has none. A subclass that
    changes only how an optimizer of torch's is made takes the same step."""
    if type(optimizer).__module__ in plugin_modules():
        return f"{type(optimizer).__module__}:{type(optimizer).__qualname__}"
    for each in type(optimizer).__mro__:
        if OPTIMIZERS.get(each.__name__) is each:
            return each.__name__ if inspect.unwrap(type(optimizer).step) is inspect.unwrap(each.step) else ""
        if any(callable(value) for name, value in vars(each).items() if name not in ("__init__", "step")):
            return ""
    return ""


def _describe_group(group: dict[str, Any], kind: str, numbers: dict[int, int]) -> ParameterGroup:
    """Describes one group; tensors that are not trained, and so not in ``numbers``, are left out."""
    tensors = sorted(numbers[id(each)] for each in group["params"] if id(each) in numbers)
    arguments = inspect.signature(_class(kind)).parameters
    # a plugin's class may read more from a group than arguments, such as the rank of a projection
    names = [name for name in (group if ":" in kind else arguments) if name not in {*_HOW, "param_names"}]
    infinite = {name for name, each in arguments.items() if each.default == group.get(name) == math.inf}  # as they are
    options = {
        name: _plain(group[name], name) for name in names if group.get(name) is not None and name not in infinite
    }
    return ParameterGroup(tensors, options)


def _class(name: str) -> Any:
    """Returns the class of this name; None if the server has none. A plugin's is imported, and never unpickled."""
    module, _, own = name.partition(":")
    if own and module in plugin_modules():
        found = getattr(import_module(module), own, None)
        return found if inspect.isclass(found) and issubclass(found, Optimizer) else None
    return OPTIMIZERS.get(name)


def _arguments_of(kind: Any) -> list[str]:
    """Returns the constructor's options of the step. A group has more entries, of schedules and of torch itself."""
    return [name for name in inspect.signature(kind).parameters if name not in _HOW]


def _plain(value: Any, name: str) -> _Option:
    """Converts an option to JSON's types: torch takes numbers, tensors of one element, and pairs of either."""
    if isinstance(value, str):
        return value
    numbers = [_number(each, name) for each in (value if isinstance(value, tuple | list) else [value])]
    return numbers if isinstance(value, tuple | list) else cast(_Option, numbers[0])


def _number(value: Any, name: str) -> int | float | None:
    if value is None or isinstance(value, int):
        return value  # of a pair, one may be None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'"{name}" of the optimizer is {value!r}, which the server cannot be sent') from error
    if not math.isfinite(number):
        raise ConfigurationError(f'"{name}" of the optimizer is {value}: give a finite number')
    return number


def build_optimizer(spec: OptimizerSpec, layout: Layout, parameters: Tensor) -> Optimizer:
    """Builds the optimizer over the server's flat parameters, with a group for each of the worker's groups.

    Raises:
        ConfigurationError: there is no such optimizer or option, or the groups do not have each of the layout's tensors
            at most once.
    """
    kind = _class(spec.optimizer)
    if kind is None:
        raise ConfigurationError(f"the optimizer is {spec.optimizer}: the server has {', '.join(OPTIMIZERS)}")
    numbers = [number for group in spec.parameter_groups for number in group.tensors]
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(len(layout.segments))):
        raise ConfigurationError("the optimizer's groups have a tensor twice, or one that is not the model's")
    unknown = {name for group in spec.parameter_groups for name in group.options} - set(_arguments_of(kind))
    if unknown and not is_of_plugin(spec):
        raise ConfigurationError(f"the description of the optimizer: {spec.optimizer} has no {min(unknown)}")
    bounds = list(pairwise(accumulate((segment.size for segment in layout.segments), initial=0)))
    views = list(layout.views(parameters))

    def stepped(numbers: list[int]) -> list[Parameter]:
        if kind not in _ELEMENTWISE:
            return [Parameter(views[number]) for number in numbers]
        return _stepped(parameters, [bounds[number] for number in numbers])

    return _make(spec, stepped)


def _make(spec: OptimizerSpec, stepped: Callable[[list[int]], list[Parameter]]) -> Optimizer:
    """Makes the optimizer.

    Args:
        stepped: returns what it steps of the tensors of these numbers.

    Raises:
        ConfigurationError: its class does not take the options.
    """
    kind = _class(spec.optimizer)
    groups = [{"params": stepped(group.tensors), **_arguments(group.options)} for group in spec.parameter_groups]
    # Adagrad's first sums are of the constructor's argument, whatever a group says
    defaults = _arguments(spec.parameter_groups[0].options) if groups else {}
    if is_of_plugin(spec):
        return _make_own(kind, groups, defaults)
    try:
        for group in spec.parameter_groups:  # torch checks the options of no group
            kind([Parameter(torch.zeros(1, 1))], **_arguments(group.options))
        return kind(groups, **defaults, **({"fused": True} if spec.fused else {}))  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"the description of the optimizer: {' '.join(str(error).split())}") from error


def _make_own(kind: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> Optimizer:
    """Makes an optimizer of a plugin's class."""
    if "initial_lr" in defaults:  # the constructor was not given the rate at which a schedule is now
        defaults["lr"] = defaults["initial_lr"]
    known = _arguments_of(kind)
    try:
        return kind(groups, **{name: value for name, value in defaults.items() if name in known})  # type: ignore[no-any-return]
    except Exception as error:  # of any kind: it is a user's class
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"the optimizer is {kind.__name__}, which cannot be made from its groups alone, as the server makes it "
            f"({said}): use local SGD"
        ) from error


def of_tensors(framework: JsonObject, tensors: slice) -> JsonObject:
    """Returns the description of an optimizer for a part of the layout's tensors, which are counted from 0 there."""
    groups = framework.get("parameter_groups")
    if not isinstance(groups, list):
        return framework  # a description for another server program, which names no tensors
    own: list[JsonValue] = []
    for group in groups:
        assert isinstance(group, dict) and isinstance(numbers := group["tensors"], list)
        inside: list[JsonValue] = [
            n - tensors.start for n in numbers if isinstance(n, int) and tensors.start <= n < tensors.stop
        ]
        own.append(group | {"tensors": inside})
    return framework | {"parameter_groups": own}


def _arguments(options: dict[str, _Option]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _stepped(parameters: Tensor, bounds: Iterable[tuple[int, int]]) -> list[Parameter]:
    """Returns a group's part of the flat parameters: neighbouring tensors as one, in pieces that fit the cache."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(bounds):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return [piece for start, end in runs if end > start for piece in pieces(parameters[start:end])]
