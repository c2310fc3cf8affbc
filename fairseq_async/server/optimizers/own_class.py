"""Checks whether the server can have a user's own class of optimizer, on the worker, before the run begins."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fairseq_async.errors import ConfigurationError

Make = Callable[[Callable[[list[int]], list[Parameter]]], Optimizer]
_HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}  # not what a step is
_PLAIN = (bool, int, float, str, type(None))
_SIDE = 512  # the longest side of what is stepped for a large tensor


def check_own_class(optimizer: Optimizer, tensors: Sequence[Tensor], make: Make) -> None:
    """Checks that the server's optimizer will step as the worker's would, can be saved, and that the worker's own does
    nothing without gradients. What differs would train another model without a word, or end the server.

    Args:
        tensors: those of the layout.
        make: makes the server's optimizer, given what makes the parameters of the tensors of these numbers.

    Raises:
        ConfigurationError: the server cannot have this class, or not with these options.
    """
    kind = type(optimizer).__name__
    if has_two_sets(optimizer):
        raise ConfigurationError(
            f"the optimizer is {kind}, whose eval() gives the model other weights than it trains, which the server "
            "would not publish: use another optimizer"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise ConfigurationError(f'the optimizer is {kind}, which has no "lr": the server steps with a learning rate')
    made = make(lambda numbers: [Parameter(torch.zeros(()).expand(tensors[n].shape)) for n in numbers])
    pairs = [(vars(optimizer), vars(made)), *zip(optimizer.param_groups, made.param_groups, strict=True)]
    for own, its in ((_options(one), _options(other)) for one, other in pairs):
        for name in sorted(own.keys() & its.keys() - _HOW):
            if own[name] != its[name]:
                raise ConfigurationError(
                    f"the server's {kind} would have {its[name]!r} for {name}, and the worker's has {own[name]!r}: the "
                    "server makes it from what is in the optimizer's groups; leave the default, or use local SGD"
                )
    with torch.random.fork_rng(devices=[]):
        _try_steps(kind, tensors, make)


def has_two_sets(optimizer: Optimizer) -> bool:
    """Whether the optimizer has weights for training and others for a validation, as schedule-free ones have them."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _options(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the plain values, and those within objects, by their names; a list is as good as a tuple."""
    options: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, tuple | list) and all(isinstance(each, _PLAIN) for each in value):
            options[prefix + name] = tuple(value)
        elif isinstance(value, _PLAIN):
            options[prefix + name] = value
        elif not (prefix or isinstance(value, Tensor) or callable(value)):
            options |= _options(getattr(value, "__dict__", {}), f"{name}.")
    return options


def _try_steps(kind: str, tensors: Sequence[Tensor], make: Make) -> None:
    """Takes steps of small tensors: one without gradients, and some from a state that was saved, as the server's."""

    def small(numbers: list[int]) -> list[Parameter]:
        """The smallest tensor of each number of dimensions in a group: a matrix is often stepped otherwise."""
        by_size = sorted(numbers, key=lambda number: tensors[number].numel())
        chosen = {tensors[number].dim(): _cut(tensors[number].shape) for number in reversed(by_size)}
        return [Parameter(_numbers(chosen[dim])) for dim in sorted(chosen)]

    steps, still, again = "takes its steps", make(small), make(small)
    try:
        before = _own_options(still)
        still.step()
        moves = _own_options(still) != before or any(
            bool((each != _numbers(each.shape)).any()) for each in _parameters(still)
        )
        if moves or any(map(bool, still.state.values())):
            raise ConfigurationError(
                f"the optimizer is {kind}, whose step() does something where there are no gradients, and the worker's "
                "own has none, as the server steps: use local SGD"
            )
        _step(stepped := make(small))
        steps, file = "goes on from a state that was saved", BytesIO()
        torch.save(stepped.state_dict(), file)
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
        _step(again)
    except ConfigurationError:
        raise
    except Exception as error:  # of any kind: it is a user's class
        said = " ".join(f"{type(error).__name__}: {error}".partition(". ")[0].split())[:200]
        raise ConfigurationError(
            f"the optimizer is {kind}, which the server cannot have, since no such optimizer {steps} there ({said}): "
            "use local SGD"
        ) from error


def _cut(shape: torch.Size) -> torch.Size:
    """Returns a part of a large tensor's shape: an embedding may be alone in its group."""
    return torch.Size(min(size, _SIDE) for size in shape) if shape.numel() > _SIDE**2 else shape


def _own_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns what the constructor has given each group, such as a count of steps, which a run keeps as it is."""
    return [_options({name: group.get(name) for name in optimizer.defaults}) for group in optimizer.param_groups]


def _step(optimizer: Optimizer) -> None:
    for each in _parameters(optimizer):
        each.grad = _numbers(each.shape)
    optimizer.step()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _numbers(shape: torch.Size) -> Tensor:
    return torch.linspace(-1.0, 1.0, shape.numel()).sin().view(shape)
