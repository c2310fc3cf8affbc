"""fairseq's optimizers inside ours: their configuration, and LAMB without apex."""

import ast
import math
from argparse import Namespace
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from fairseq.optim import OPTIMIZER_REGISTRY, FairseqOptimizer, build_optimizer
from fairseq.optim.adam import Adam
from fairseq.optim.fused_lamb import FairseqLAMB
from fairseq.registry import REGISTRIES
from omegaconf import OmegaConf
from torch.nn import Module, Parameter
from torch.optim.adamw import adamw

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


class FusedAdam(Adam):
    """fairseq's Adam with the same state, by torch's fused kernel: one pass over memory in place of a dozen.

    fairseq divides by √v + ε, torch by √(v / (1 − β₂ᵗ)) + ε: with ε / √(1 − β₂ᵗ) in step t they do the same.
    """

    def step(self, closure: object = None) -> None:
        """Steps every tensor that has a gradient; all are fp32."""
        for group in self.param_groups:
            by_step: dict[int, list[Parameter]] = {}  # a tensor that had no gradient in some step is behind
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_step.setdefault(self._count(parameter), []).append(parameter)
            for count, parameters in by_step.items():
                self._step(group, count, parameters)

    def _count(self, parameter: Parameter) -> int:
        """Counts a step of the tensor; returns its number."""
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        return int(state["step"])

    def _step(self, group: dict[str, Any], count: int, parameters: list[Parameter]) -> None:
        first, second = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        with torch.no_grad():
            adamw(
                [parameter.detach() for parameter in parameters],
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=list(torch.full((len(parameters),), count - 1.0, device=parameters[0].device)),
                fused=True,
                amsgrad=False,
                beta1=first,
                beta2=second,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"] / math.sqrt(1 - second**count),
                maximize=False,
            )


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
