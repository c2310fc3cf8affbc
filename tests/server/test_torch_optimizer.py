"""The optimizer that the server builds from a description is the one that was described."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fairseq_async.errors import ConfigurationError
from fairseq_async.server import Layout
from fairseq_async.server.torch_optimizer import OptimizerSpec, RateTable, build_optimizer, describe_groups

SIZES = {"a": 3, "b": 2, "c": 4}
NAMED = [(name, nn.Parameter(torch.ones(size))) for name, size in SIZES.items()]
LAYOUT = Layout.of(NAMED)
(A, B, C) = (parameter for _, parameter in NAMED)


def described(optimizer: Optimizer, **more: Any) -> OptimizerSpec:
    """As the server gets it, through JSON."""
    spec = OptimizerSpec(type(optimizer).__name__, describe_groups(optimizer, NAMED), **more)
    return OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json())))


def test_interleaved_groups_are_runs_of_the_flat_parameters_with_their_own_options() -> None:
    """One step of SGD on a gradient of ones moves each element by its group's rate."""
    optimizer = SGD([{"params": [C, A], "lr": 0.5}, {"params": [B]}], lr=torch.tensor(0.25))
    flat = torch.zeros(9)
    built = build_optimizer(described(optimizer), LAYOUT, flat)
    for group in built.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    built.step()
    assert flat.tolist() == [-0.5] * 3 + [-0.25] * 2 + [-0.5] * 4
    assert [len(group["params"]) for group in built.param_groups] == [2, 1]


def test_neighbouring_tensors_of_a_group_are_stepped_as_one() -> None:
    built = build_optimizer(described(Adam([A, B, C])), LAYOUT, torch.zeros(9))
    assert [parameter.shape for parameter in built.param_groups[0]["params"]] == [(9,)]


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_every_option_but_how_a_step_is_computed_is_the_same(kind: Any) -> None:
    options: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.2, "maximize": True}
    options |= (
        {"momentum": 0.5, "nesterov": True} if kind is SGD else {"betas": (0.5, 0.6), "eps": 0.1, "amsgrad": True}
    )
    optimizer = kind([A, B, C], foreach=True, **options)
    (group,) = build_optimizer(described(optimizer), LAYOUT, torch.zeros(9)).param_groups
    (given,) = optimizer.param_groups
    assert {key: value for key, value in group.items() if key not in ("params", "foreach")} == {
        key: value for key, value in given.items() if key not in ("params", "foreach")
    }


def test_rates_follow_the_steps_and_the_last_ones_stay() -> None:
    spec = described(SGD([{"params": [A]}, {"params": [B, C]}], lr=1.0), learning_rates=[[0.1, 0.2], [0.3, 0.4]])
    optimizer = build_optimizer(spec, LAYOUT, torch.zeros(9))
    table = RateTable(optimizer, spec.learning_rates)
    seen = []
    for steps in (0, 1, 5):
        table.follow(steps)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert seen == [[0.1, 0.2], [0.3, 0.4], [0.3, 0.4]] and table.learning_rate == 0.3


def test_a_description_that_is_wrong_is_refused() -> None:
    spec = described(SGD([A, B, C], lr=1.0))
    flat = torch.zeros(9)
    with pytest.raises(ConfigurationError, match="Rprop: the server has Adam, AdamW, SGD"):
        build_optimizer(replace(spec, optimizer="Rprop"), LAYOUT, flat)
    with pytest.raises(ConfigurationError, match="not each tensor of the model once"):
        build_optimizer(replace(spec, parameter_groups=spec.parameter_groups * 2), LAYOUT, flat)
    with pytest.raises(ConfigurationError, match="not those of 1 parameter groups"):
        RateTable(build_optimizer(spec, LAYOUT, flat), [[0.1, 0.2]])
    with pytest.raises(ConfigurationError, match="the description of the optimizer: clip_norm"):
        OptimizerSpec.from_json(spec.to_json() | {"clip_norm": "none"})
