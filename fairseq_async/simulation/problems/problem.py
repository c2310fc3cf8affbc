"""Simulated problems: the interface, and how one is built from its name."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError


@runtime_checkable
class Problem(Protocol):
    """A model, its data and its loss. A user's own function (``module:callable``) may return one.

    Attributes:
        model: in training mode, on the device where it is to be trained.
        samples: number of samples in the training set.
    """

    model: torch.nn.Module
    samples: int

    def batch(self, indices: Sequence[int]) -> Any:
        """Returns a batch of these samples, on the model's device, in the form that :meth:`loss` takes."""
        ...

    def loss(self, batch: Any) -> tuple[Tensor, float]:
        """Returns the mean loss in nats with its graph, and the number of (target) tokens or samples in this mean."""
        ...

    def evaluate(self) -> float:
        """Returns the mean loss on held-out data, in nats; leaves the model in training mode."""
        ...


def build(settings: Mapping[str, object], directory: Path, seed: int, device: torch.device) -> Problem:
    """Builds the problem that an experiment names; its initial parameters and its data follow from the seed.

    Args:
        settings: ``type`` and the arguments of that type.
        directory: of the experiment file, from which relative paths and modules are found.

    Raises:
        ConfigurationError: there is no such problem, or it does not take these arguments.
    """
    arguments = dict(settings)
    kind = str(arguments.pop("type", ""))
    torch.manual_seed(seed)
    try:
        problem = _function(kind, directory)(seed=seed, device=device, **_located(arguments, directory))
    except TypeError as error:
        raise ConfigurationError(f'"problem" ({kind}): {error}') from error
    if not isinstance(problem, Problem):
        raise ConfigurationError(f'"problem": "type": {kind} returned {type(problem).__name__}, which is no Problem')
    return problem


_BUILT_IN = {
    "gaussians": "fairseq_async.simulation.problems.gaussians:Gaussians",
    "c4_lm": "recipes.c4_lm.simulated:C4",
    "fairseq_translation": "fairseq_async.simulation.problems.translation:Translation",
}


def _function(kind: str, directory: Path) -> Callable[..., object]:
    """Imports the function or class of a built-in name or MODULE:NAME."""
    name = _BUILT_IN.get(kind, kind)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigurationError(
            f'"problem": "type": {kind or "is missing"}; there are {", ".join(_BUILT_IN)} and MODULE:NAME'
        )
    sys.path += [str(path) for path in (directory, Path.cwd()) if str(path) not in sys.path]
    try:
        return cast(Callable[..., object], getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        where = "; start the simulation in a checkout of the project" if module.startswith("recipes.") else ""
        raise ConfigurationError(f'"problem": "type": {kind} cannot be imported: {error}{where}') from error


def _located(arguments: Mapping[str, object], directory: Path) -> dict[str, object]:
    """Returns the arguments with ``data`` and ``init`` as paths, which are relative to the experiment file."""
    paths = {name: arguments[name] for name in ("data", "init") if name in arguments}
    return {**arguments, **{name: directory / Path(cast(str, path)).expanduser() for name, path in paths.items()}}
