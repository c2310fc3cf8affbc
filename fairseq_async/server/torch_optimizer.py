"""A torch optimizer in plain data, from which the server builds the same one: nothing of it is pickled."""

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import accumulate, pairwise

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError, with_config
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from fairseq_async.algorithms.hybrid import pieces
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject
from fairseq_async.server.layout import Layout

# each steps every element by itself, so a model may be stepped in pieces
_OPTIMIZERS: dict[str, type[Adam | AdamW | SGD]] = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD}
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not what it is
_STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(_STRICT)
@dataclass(frozen=True)
class ParameterGroup:
    """Options of some of the model's tensors.

    Attributes:
        tensors: their numbers in the layout.
        options: arguments of the optimizer's constructor, such as ``lr``.
    """

    tensors: list[int]
    options: JsonObject


@with_config(_STRICT)
@dataclass(frozen=True)
class OptimizerSpec:
    """What steps in the server. Worker 0 sends it; every other worker must send an equal one.

    Attributes:
        optimizer: name of the class in ``torch.optim``.
        parameter_groups: as the optimizer has them, in its order.
        learning_rates: of each group, after 0, 1, … steps; the last ones stay. Empty where they are constant.
        clip_norm: largest L2 norm of the gradient that is stepped with; 0 does not clip.
    """

    optimizer: str
    parameter_groups: list[ParameterGroup]
    learning_rates: list[list[float]] = field(default_factory=list)
    clip_norm: float = 0.0

    def to_json(self) -> JsonObject:
        """The ``framework`` of a :class:`~fairseq_async.method_spec.MethodSpec`."""
        return asdict(self)

    @classmethod
    def from_json(cls, framework: JsonObject) -> "OptimizerSpec":
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigurationError: it is no such description.
        """
        try:
            return _adapter().validate_json(json.dumps(framework))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationError(f"the description of the optimizer: {where}: {first['msg']}") from error


@cache
def _adapter() -> TypeAdapter[OptimizerSpec]:
    return TypeAdapter(OptimizerSpec)


def describe_groups(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> list[ParameterGroup]:
    """The groups of an optimizer of the named tensors, which are in the order of the layout.

    Raises:
        ConfigurationError: the server has no such optimizer.
    """
    kind = type(optimizer)
    if _OPTIMIZERS.get(kind.__name__) is not kind:
        raise ConfigurationError(
            f"the optimizer is {kind.__name__}: the server steps with Adam, AdamW or SGD of torch.optim; give one of "
            "these, or use local SGD, which takes any"
        )
    places = {id(tensor): number for number, (_, tensor) in enumerate(named)}
    groups = []
    for group in optimizer.param_groups:
        tensors = sorted(places[id(each)] for each in group["params"] if id(each) in places)
        groups.append(ParameterGroup(tensors, _options(kind, group)))
    return groups


def _options(kind: type, group: dict[str, object]) -> JsonObject:
    """What the constructor takes; a group has also what schedules and torch itself keep there."""
    taken = [name for name in inspect.signature(kind).parameters if name in group and name not in _HOW]
    return {name: _plain(group[name]) for name in taken}


def _plain(value: object) -> JsonValue:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def build_optimizer(spec: OptimizerSpec, layout: Layout, parameters: Tensor) -> Optimizer:
    """The optimizer over the server's flat parameters, with a group for each of the worker's.

    Raises:
        ConfigurationError: there is no such optimizer, or the groups are not those of the layout's tensors.
    """
    kind = _OPTIMIZERS.get(spec.optimizer)
    if kind is None:
        raise ConfigurationError(f"the optimizer is {spec.optimizer}: the server has {', '.join(_OPTIMIZERS)}")
    numbers = sorted(number for group in spec.parameter_groups for number in group.tensors)
    if numbers != list(range(len(layout.segments))):
        raise ConfigurationError("the optimizer's groups have not each tensor of the model once")
    bounds = list(pairwise(accumulate((segment.size for segment in layout.segments), initial=0)))
    groups = [
        {"params": _stepped(parameters, [bounds[number] for number in group.tensors]), **_arguments(group.options)}
        for group in spec.parameter_groups
    ]
    return kind(groups)


def _arguments(options: JsonObject) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _stepped(parameters: Tensor, bounds: Iterable[tuple[int, int]]) -> list[Parameter]:
    """The group's part of the flat parameters: neighbouring tensors are stepped as one, in pieces for the cache."""
    runs: list[tuple[int, int]] = []
    for start, end in bounds:
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return [piece for start, end in runs if end > start for piece in pieces(parameters[start:end])]


class RateTable:
    """The learning rates of an optimizer in the server, counted in its steps; a schedule of
    :class:`~fairseq_async.server.scheduled_rule.ScheduledRule`.

    Args:
        rates: see :class:`OptimizerSpec`.

    Raises:
        ConfigurationError: a row has not one rate for each group.
    """

    def __init__(self, optimizer: Optimizer, rates: list[list[float]]) -> None:
        groups = len(optimizer.param_groups)
        if any(len(row) != groups for row in rates):
            raise ConfigurationError(f"the learning rates are not those of {groups} parameter groups")
        self.optimizer, self.rates = optimizer, rates

    @property
    def learning_rate(self) -> float:
        """The first group's rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, steps: int) -> None:
        """Sets the rates of the step after so many steps."""
        if self.rates:
            row = self.rates[min(steps, len(self.rates) - 1)]
            for group, rate in zip(self.optimizer.param_groups, row, strict=True):
                group["lr"] = rate

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: the rates are of steps."""

    def end_epoch(self, epoch: int, loss: float | None) -> None:
        """Does nothing: the rates are of steps."""

    def state_dict(self) -> dict[str, object]:
        """Nothing: the number of steps says all."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See :meth:`state_dict`."""
