"""The optimizer in the server takes the steps that the script's own optimizer would take, group by group."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, cpu_adam, fused_adam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.deepspeed_plugin import optimizers
from fairseq_async.errors import ConfigurationError
from fairseq_async.method_spec import JsonObject
from fairseq_async.server import Layout

SIZES = (3, 1, 4, 2, 5)
Make = Callable[..., Optimizer]


def model(sizes: tuple[int, ...] = SIZES) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])


def described(optimizer: Optimizer, parameters: nn.ParameterList) -> tuple[JsonObject, Layout]:
    named = [(name, each) for name, each in parameters.named_parameters() if each.requires_grad]
    return optimizers.describe(optimizer, named), Layout.of(named)


def steps_in_the_server(optimizer: Optimizer, parameters: nn.ParameterList, steps: int = 3) -> torch.Tensor:
    """The parameters after so many steps of the script's own optimizer, less those after the server's."""
    description, layout = described(optimizer, parameters)
    trained = [each for each in parameters if each.requires_grad]
    flat = torch.cat([each.detach().flatten() for each in trained])
    served = HybridAccumulation(optimizers.build(description, layout, flat), 1, elementwise=True)
    for step in range(steps):
        for number, each in enumerate(trained):
            each.grad = torch.linspace(-1, 2, each.numel()).view_as(each) * (number + 1) - step
        served.apply(flat, Update(0, step, step, 1.0, torch.cat([each.grad.flatten() for each in trained])))
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in trained]) - flat


ADAMS: tuple[Make, ...] = (partial(Adam, amsgrad=True), AdamW, partial(Adam, maximize=True))
SGDS: tuple[Make, ...] = (SGD, partial(SGD, momentum=0.9, nesterov=True), partial(SGD, momentum=0.5, dampening=0.2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.sampled_from(ADAMS + SGDS), st.data())
def test_each_group_steps_with_its_own_options_wherever_its_tensors_lie(
    group_of: list[int], make: Make, data: st.DataObject
) -> None:
    parameters = model()
    groups: list[dict[str, Any]] = []
    for group in sorted(set(group_of)):
        options = {"lr": data.draw(st.sampled_from([0.0, 0.1, 0.7])), "weight_decay": data.draw(st.floats(0, 0.5))}
        groups.append(
            {"params": [each for each, of in zip(parameters, group_of, strict=True) if of == group]} | options
        )
    assert steps_in_the_server(make(groups, lr=0.3), parameters).abs().max() <= 1e-5


def test_what_is_in_no_group_or_in_one_without_a_rate_stays() -> None:
    parameters = model()
    optimizer = SGD([{"params": [parameters[1], parameters[4]]}, {"params": [parameters[2]], "lr": 0.0}], lr=0.5)
    description, layout = described(optimizer, parameters)
    flat = torch.zeros(sum(SIZES))
    rule = HybridAccumulation(optimizers.build(description, layout, flat), 1, elementwise=True)
    rule.apply(flat, Update(0, 0, 0, 1.0, torch.ones(sum(SIZES))))
    assert flat.tolist() == [0.0] * 3 + [-0.5] + [0.0] * 6 + [-0.5] * 5


def test_neighbours_in_one_group_are_one_run_of_the_flat_vector() -> None:
    parameters = model()
    optimizer = SGD([{"params": [parameters[1], parameters[0], parameters[4]]}, {"params": [parameters[3]]}], lr=0.1)
    built = optimizers.build(*described(optimizer, parameters), torch.zeros(sum(SIZES)))
    assert [[each.numel() for each in group["params"]] for group in built.param_groups] == [[4, 5], [2]]


def test_parameters_that_are_not_trained_are_no_part_of_a_group() -> None:
    parameters = model()
    parameters[1].requires_grad = False
    assert not steps_in_the_server(AdamW(parameters.parameters(), lr=0.1), parameters).any()
    description, _ = described(SGD(parameters.parameters(), lr=torch.tensor(0.25)), parameters)
    (group,) = description["groups"]
    assert group["parameters"] == [0, 1, 2, 3] and group["options"]["lr"] == 0.25


class Compiled:
    """Stands for DeepSpeed's compiled steps, which need a minute to compile and are not called here."""

    multi_tensor_adam = None

    def load(self) -> "Compiled":
        return self

    def create_adam(self, *options: object) -> None: ...

    def destroy_adam(self, number: int) -> None: ...


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (FusedAdam, "AdamW"),
        (partial(FusedAdam, adam_w_mode=False), "Adam"),
        (DeepSpeedCPUAdam, "AdamW"),
        (partial(DeepSpeedCPUAdam, adamw_mode=False), "Adam"),
        (partial(Adam, decoupled_weight_decay=True), "AdamW"),
    ],
)
def test_deepspeeds_adam_is_torchs_with_its_own_defaults(
    make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", Compiled)
    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", Compiled)
    parameters = model()
    description, layout = described(make(parameters.parameters(), betas=(0.8, 0.9)), parameters)
    assert description["type"] == kind
    (group,) = optimizers.build(description, layout, torch.zeros(sum(SIZES))).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 1e-8, 0)


class OwnSGD(SGD):
    """A script's own class may step otherwise."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NAdam, "the optimizer NAdam has no equal in the server; use one of Adam, AdamW, SGD, FusedAdam and"),
        (OwnSGD, "the optimizer OwnSGD has no equal"),
        (partial(SGD, weight_decay=float("inf")), '"weight_decay" of the optimizer is inf: give a finite number'),
        (partial(FusedAdam, bias_correction=False), "FusedAdam with bias_correction False has no equal"),
    ],
)
def test_what_the_server_cannot_take_is_refused_in_one_line(
    make: Make, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", Compiled)
    parameters = model()
    with pytest.raises(ConfigurationError, match=message) as caught:
        described(make(parameters.parameters(), lr=0.1), parameters)
    assert "\n" not in str(caught.value)


def test_a_parameter_that_the_model_has_not_is_refused() -> None:
    parameters = model()
    with pytest.raises(ConfigurationError, match="a parameter that is not one of the model's"):
        described(SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1), parameters)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"type": "Lion", "groups": []},
        {"type": "SGD", "groups": [{"parameters": [5], "options": {"lr": 0.1}}]},
        {"type": "SGD", "groups": [{"parameters": [-1], "options": {"lr": 0.1}}]},
        {"type": "SGD", "groups": [{"parameters": [0], "options": {"closure": 1}}]},
        {"type": "SGD", "groups": [{"parameters": [0], "options": {"lr": "0.1"}}]},
    ],
)
def test_a_description_that_no_worker_sends_is_one_line(description: JsonObject) -> None:
    parameters = model()
    layout = Layout.of(list(parameters.named_parameters()))
    with pytest.raises(ConfigurationError, match="the description of the optimizer cannot be used") as caught:
        optimizers.build(description, layout, torch.zeros(layout.size))
    assert "\n" not in str(caught.value)
