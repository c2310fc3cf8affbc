"""The state of optimizers that have stepped before a run, as a state from which the run's server goes on."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fairseq_async.algorithms import HybridAccumulation
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import MethodSpec
from fairseq_async.server.coordinator import build_coordinator
from fairseq_async.server.gradient_main import build
from fairseq_async.server.layout import Layout
from fairseq_async.server.membership import Membership
from fairseq_async.server.optimizers.several import SeveralOptimizers

Named = Sequence[tuple[str, Parameter]]


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer has moments, or another state, from steps before."""
    return any(optimizer.state.values())


def brought_state(spec: MethodSpec, named: Named, optimizers: Sequence[Optimizer]) -> State:
    """Returns the state of a server that goes on with these parameters and with the optimizers' states: moments and
    step counts of each tensor by themselves. The server's own count of steps begins at 0.

    Args:
        named: all parameters of the run with their names, in the order of its layout.
        optimizers: in the order of the run's description.

    Raises:
        ConfigurationError: the run's server is in shards, or has another rule than the accumulation of gradients.
    """
    layout = Layout.of(named)
    parameters = torch.cat([each.detach().cpu().flatten() for _, each in named])
    rule, plan = build(spec, layout, parameters)
    parts = rule.rules if isinstance(rule, SeveralOptimizers) else [rule]
    for part, optimizer in zip(parts, optimizers, strict=True):
        accumulation = getattr(part, "rule", None)
        if spec.server.shards > 1 or not isinstance(accumulation, HybridAccumulation):
            raise ConfigurationError(
                f"{type(optimizer).__name__} has stepped before this run, and a server in shards, or with "
                "gradient_rule=, cannot be given its moments: leave these options out, or make the optimizer anew"
            )
        accumulation.cut_into_tensors()
        _copy_state(optimizer, accumulation.optimizer, named)
    coordinator = build_coordinator(spec, rule, plan, parameters, Membership(spec.workers, 0.0))
    return coordinator.state_dict() | {"method": spec.name}


def _copy_state(source: Optimizer, target: Optimizer, named: Named) -> None:
    """Copies the state of each parameter to the pieces of it that the server's optimizer steps."""
    firsts = [0, *accumulate(parameter.numel() for _, parameter in named)]  # elements of the flat vector
    for piece in (piece for group in target.param_groups for piece in group["params"]):
        start = piece.storage_offset()
        number = bisect_right(firsts, start) - 1
        first, parameter = firsts[number], named[number][1]
        part = slice(start - first, start - first + piece.numel())
        values = {key: _part_of(value, parameter, part) for key, value in source.state.get(parameter, {}).items()}
        if values:
            target.state[piece] = values


def _part_of(value: Any, parameter: Parameter, part: slice) -> Any:
    """Returns what a piece has of a parameter's state: the part of a moment, and copies of all else."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().to("cpu", torch.float32, copy=True)
    return copied.flatten()[part].clone() if value.shape == parameter.shape else copied
