"""fairseq's optimizers inside ours: their configuration, and LAMB without apex."""

import ast
from argparse import Namespace
from collections.abc import Mapping
from itertools import chain

from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, build_optimizer
from fairseq.optim.fused_lamb import FairseqLAMB
from fairseq.registry import REGISTRIES
from omegaconf import OmegaConf
from torch.nn import Module, Parameter

from fairseq_async.algorithms.lamb import Lamb
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig

_EVALUATED = ("_betas", "adafactor_eps")  # endings of the names of options that fairseq gives to eval


def trainable_parameters(model: Module, criterion: Module) -> list[tuple[str, Parameter]]:
    """Returns the parameters that fairseq's trainer gives its optimizer, in the trainer's order, with their names."""
    named = chain(model.named_parameters(), criterion.named_parameters())
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def build_inner(args: Namespace, params: list[Parameter]) -> FairseqOptimizer:
    """Builds the optimizer that ``--inner-optimizer`` names, with its own flags."""
    inner = Namespace(**vars(args) | betas_as_strings(args) | {"optimizer": args.inner_optimizer})
    try:
        return build_optimizer(inner, params)
    except ImportError:
        if OPTIMIZER_REGISTRY[args.inner_optimizer] is not FairseqLAMB:
            raise
        return TorchLAMB(inner, params)


class TorchLAMB(FairseqLAMB):
    """fairseq's LAMB with our implementation: fairseq takes it from apex alone, which is compiled for GPUs."""

    def __init__(self, args: Namespace, params: list[Parameter]) -> None:
        self.args = args
        self._optimizer = Lamb(params, **self.optimizer_config)


def betas_as_strings(args: Namespace) -> dict[str, str]:
    """Returns the flags that are betas as strings, as on a command line.

    fairseq evaluates a string, or takes a list of OmegaConf's. The default of the flag is a tuple, which is neither.
    """
    given = {name: value for name, value in vars(args).items() if name.endswith("_betas")}
    return {name: value if isinstance(value, str) else repr(tuple(value)) for name, value in given.items()}


def component_config(description: Mapping[str, object], registry: str) -> FairseqConfig:
    """Returns the configuration from which fairseq builds an optimizer or a schedule.

    Args:
        description: the component's options, and its name as ``_name``. They came over a wire, and fairseq would
            evaluate a string to get a pair of numbers, so pairs are parsed here first. Refused are ${ in a value, since
            OmegaConf would look up what follows, and an optimizer in an option, since it has pairs of its own.
        registry: fairseq's registry of such components.

    Raises:
        ValueError: an option is not a plain value, or not a pair of numbers.
    """
    nested = [key for key, value in description.items() if isinstance(value, Mapping) or "${" in str(value)]
    if nested:
        raise ValueError(f"{nested[0]} is no plain value")
    pairs = {key: _parse_pair(value) for key, value in description.items() if key.endswith(_EVALUATED)}
    if description["_name"] in REGISTRIES[registry]["dataclass_registry"]:
        return OmegaConf.create({**description, **pairs})
    old_style = {key: str(value) for key, value in pairs.items()}
    return Namespace(**{**description, **old_style, registry: description["_name"]})


def _parse_pair(value: object) -> list[float]:
    first, second = ast.literal_eval(value) if isinstance(value, str) else value  # type: ignore[misc]
    return [float(first), float(second)]
