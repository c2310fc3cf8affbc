"""The optimizer that the server builds from a description takes the steps of the one that was described."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.threads import PIECE, set_threads
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Layout
from fairseq_async.server.optimizers.torch_optimizer import OptimizerSpec, build_optimizer, describe
from scripts.faults.adder import adder_spec

SIZES = (3, 1, 4, 2, 5)
Make = Callable[..., Optimizer]


def model() -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES])


def described(optimizer: Optimizer, parameters: nn.ParameterList, **more: Any) -> tuple[OptimizerSpec, Layout]:
    """As the server gets it, through JSON."""
    named = [(name, each) for name, each in parameters.named_parameters() if each.requires_grad]
    spec = describe(optimizer, named, **more)
    return OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json()))), Layout.of(named)


def steps_in_the_server(optimizer: Optimizer, parameters: nn.ParameterList, steps: int = 3) -> torch.Tensor:
    """The parameters after so many steps of the script's own optimizer, less those after the server's."""
    spec, layout = described(optimizer, parameters)
    trained = [each for each in parameters if each.requires_grad]
    flat = torch.cat([each.detach().flatten() for each in trained])
    served = HybridAccumulation(build_optimizer(spec, layout, flat), 1, elementwise=True)
    for step in range(steps):
        for number, each in enumerate(trained):
            each.grad = torch.linspace(-1, 2, each.numel()).view_as(each) * (number + 1) - step
        served.apply(flat, Update(0, step, step, 1.0, torch.cat([each.grad.flatten() for each in trained])))
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in trained]) - flat


ADAMS: tuple[Make, ...] = (
    partial(Adam, amsgrad=True),
    AdamW,
    partial(Adam, maximize=True),
    partial(Adam, decoupled_weight_decay=True),
    Adadelta,
    partial(Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    Adamax,
    partial(NAdam, momentum_decay=0.1, decoupled_weight_decay=True),
    RAdam,
    partial(RMSprop, momentum=0.5, centered=True),
)
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
    flat = torch.zeros(sum(SIZES))
    rule = HybridAccumulation(build_optimizer(*described(optimizer, parameters), flat), 1, elementwise=True)
    rule.apply(flat, Update(0, 0, 0, 1.0, torch.ones(sum(SIZES))))
    assert flat.tolist() == [0.0] * 3 + [-0.5] + [0.0] * 6 + [-0.5] * 5


def test_neighbours_in_one_group_are_one_run_of_the_flat_vector() -> None:
    parameters = model()
    optimizer = SGD([{"params": [parameters[1], parameters[0], parameters[4]]}, {"params": [parameters[3]]}], lr=0.1)
    built = build_optimizer(*described(optimizer, parameters), torch.zeros(sum(SIZES)))
    assert [[each.numel() for each in group["params"]] for group in built.param_groups] == [[4, 5], [2]]


def test_parameters_that_are_not_trained_are_no_part_of_a_group() -> None:
    parameters = model()
    parameters[1].requires_grad = False
    assert not steps_in_the_server(AdamW(parameters.parameters(), lr=0.1), parameters).any()
    (group,) = described(SGD(parameters.parameters(), lr=torch.tensor(0.25)), parameters)[0].parameter_groups
    assert group.tensors == [0, 1, 2, 3] and group.options["lr"] == 0.25


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_every_option_but_how_a_step_is_computed_is_the_same(kind: Any) -> None:
    options: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.2, "maximize": True}
    options |= (
        {"momentum": 0.5, "nesterov": True} if kind is SGD else {"betas": (0.5, 0.6), "eps": 0.1, "amsgrad": True}
    )
    parameters = model()
    optimizer = kind(parameters.parameters(), foreach=True, **options)
    (group,) = build_optimizer(*described(optimizer, parameters), torch.zeros(sum(SIZES))).param_groups
    (own,) = optimizer.param_groups
    assert {key: value for key, value in group.items() if key not in ("params", "foreach")} == {
        key: value for key, value in own.items() if key not in ("params", "foreach")
    }


@pytest.mark.parametrize("make", [AdamW, partial(Adam, amsgrad=True), partial(SGD, momentum=0.9, nesterov=True)])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_optimizer_with_fused_kernels_has_them_in_the_server(make: Make, threads: int) -> None:
    """Also where a tensor has no gradient in a step."""
    results, parameters = [], torch.linspace(-1, 1, 3 * PIECE + 5)
    for fused in (True, False):
        own = nn.ParameterList([parameters[:-3].clone(), parameters[-3:].clone()])
        spec, layout = described(make(own.parameters(), lr=0.01, fused=fused), own)
        flat = parameters.clone()
        optimizer = build_optimizer(spec, layout, flat)
        rule = HybridAccumulation(
            optimizer, 1, elementwise=True, tensors=[nn.Parameter(each) for each in layout.views(flat)]
        )
        assert optimizer.defaults["fused"] is (True if fused else None)
        set_threads(threads)
        for step in range(50):
            gradient = torch.sin(parameters * (step + 1))
            rule.apply(flat, Update(0, step, step, 1.0, gradient, missing=2 * (step % 3 == 1)))
        set_threads(1)
        results.append(flat)
    assert (results[0] - results[1]).norm() < 1e-6 * results[1].norm()


def test_workers_on_different_devices_may_choose_different_kernels() -> None:
    own = nn.ParameterList([torch.ones(3)])
    fused, loop = (described(AdamW(own.parameters(), fused=each), own)[0].to_json() for each in (True, False))
    spec = adder_spec(framework=fused)
    assert fused["fused"] and spec.difference(adder_spec(framework=loop)) is None
    assert spec.difference(adder_spec(framework=loop | {"clip_norm": 1.0})) is not None


def test_another_optimizer_is_described_by_the_class_that_steps_equally() -> None:
    parameters = model()
    spec, _ = described(NAdam(parameters.parameters(), lr=0.5), parameters, kind="Adam")
    assert spec.optimizer == "Adam" and spec.parameter_groups[0].options["lr"] == 0.5


class OwnSGD(SGD):
    """A script's own class may step otherwise."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Rprop,
            "the optimizer is Rprop: the server steps with Adam, AdamW, SGD, .* and fairseq_async.torch; .*PLUGINS",
        ),
        (OwnSGD, "the optimizer is OwnSGD: the server steps with"),
        (type("SGD", (OwnSGD,), {}), r"the optimizer is [\w.]*test_torch_optimizer\.SGD: the server steps with"),
        (partial(SGD, weight_decay=float("inf")), '"weight_decay" of the optimizer is inf: give a finite number'),
    ],
)
def test_what_the_server_cannot_take_is_refused_in_one_line(make: Make, message: str) -> None:
    parameters = model()
    with pytest.raises(ConfigurationError, match=message) as caught:
        described(make(parameters.parameters(), lr=0.1), parameters)
    assert "\n" not in str(caught.value)


def test_a_parameter_that_the_model_has_not_is_refused() -> None:
    parameters = model()
    with pytest.raises(ConfigurationError, match="1 parameters that are not the model's"):
        described(SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1), parameters)


GROUP = {"tensors": [0], "options": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "Rprop"}, "Rprop: the server has Adam, AdamW, SGD"),
        ({"parameter_groups": [GROUP, GROUP]}, "have a tensor twice, or one that is not"),
        ({"parameter_groups": [GROUP | {"tensors": [5]}]}, "have a tensor twice, or one that is not"),
        ({"parameter_groups": [GROUP | {"tensors": [-1]}]}, "the description of the optimizer: parameter_groups.0"),
        ({"parameter_groups": [GROUP | {"options": {"closure": 1.0}}]}, "the optimizer: SGD has no closure"),
        (
            {"parameter_groups": [GROUP | {"options": {"lr": "0.1"}}]},
            "the description of the optimizer: '<' not supported",
        ),
        ({"parameter_groups": [GROUP | {"options": {"lr": [[0.1]]}}]}, "the description of the optimizer: parameter"),
        ({"optimizer": "os:system"}, "os:system: the server has Adam, AdamW, SGD"),
        ({"parameter_groups": []}, "the description of the optimizer: optimizer got an empty parameter list"),
        ({"clip_norm": "none"}, "the description of the optimizer: clip_norm"),
        ({"clip_norm": -1.0}, "the description of the optimizer: clip_norm"),
        ({"closure": 1}, "the description of the optimizer: closure"),
    ],
)
def test_a_description_that_no_worker_sends_is_one_line(changes: dict[str, Any], message: str) -> None:
    spec, layout = described(SGD((parameters := model()).parameters(), lr=1.0), parameters)
    with pytest.raises(ConfigurationError, match=message) as caught:
        build_optimizer(OptimizerSpec.from_json(spec.to_json() | changes), layout, torch.zeros(layout.size))
    assert "\n" not in str(caught.value)


class Configured(AdamW):
    """A subclass that a script makes for its defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)


class Flipped(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_subclass_that_takes_the_same_step_is_its_base_class() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    named = [("weight", weight)]
    assert describe(Configured([weight]), named) == describe(AdamW([weight], lr=0.1), named)
    with pytest.raises(ConfigurationError, match="the optimizer is Flipped"):
        describe(Flipped([weight]), named)
