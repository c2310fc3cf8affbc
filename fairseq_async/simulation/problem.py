"""What is trained in a simulation."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError


@runtime_checkable
class Problem(Protocol):
    """A model, its data and its loss. A function of the user's own (``module:callable``) returns one.

    Attributes:
        model: in training mode, on the device where it is to be trained.
        samples: how many there are to draw from.
    """

    model: torch.nn.Module
    samples: int

    def batch(self, indices: Sequence[int]) -> Any:
        """These samples together, on the model's device."""
        ...

    def loss(self, batch: Any) -> tuple[Tensor, float]:
        """The mean loss in nats, to be differentiated, and over how many (target) tokens or samples it is the mean."""
        ...

    def evaluate(self) -> float:
        """The mean loss on data that is not trained on, in nats; leaves the model in training mode."""
        ...


def build(settings: dict[str, Any], directory: Path, seed: int, device: torch.device) -> Problem:
    """The problem that an experiment names; its fresh parameters and its data follow from the seed.

    Args:
        settings: ``type`` and what it takes.
        directory: that of the experiment file, from which relative paths and modules are found.

    Raises:
        ConfigurationError: there is no such problem, or it does not take these settings.
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


_OURS = {
    "gaussians": "fairseq_async.simulation.gaussians:Gaussians",
    "c4_lm": "recipes.c4_lm.simulated:C4",
    "fairseq_translation": "fairseq_async.simulation.translation:Translation",
}


def _function(kind: str, directory: Path) -> Any:
    name = _OURS.get(kind, kind)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigurationError(
            f'"problem": "type": {kind or "is missing"}; there are {", ".join(_OURS)} and MODULE:NAME'
        )
    sys.path += [str(path) for path in (directory, Path.cwd()) if str(path) not in sys.path]
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        where = "; start the simulation in a checkout of the project" if module.startswith("recipes.") else ""
        raise ConfigurationError(f'"problem": "type": {kind} cannot be imported: {error}{where}') from error


def _located(arguments: dict[str, Any], directory: Path) -> dict[str, Any]:
    """``data`` and ``init`` are paths, relative to the experiment file."""
    found = {name: directory / Path(arguments[name]).expanduser() for name in ("data", "init") if name in arguments}
    return arguments | found
