"""Which tensors of a DeepSpeed engine are exchanged, stepped and looked at."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD

from fairseq_async.deepspeed_plugin.engines import tensors, zero3
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.replica import MasterReplica, TensorReplica


def engine_of(model: nn.Module, optimizer: Any = None, divided: bool = False) -> Any:
    return SimpleNamespace(module=model, optimizer=optimizer, zero_optimization_partition_weights=lambda: divided)


def network() -> nn.Sequential:
    """A model whose first layer has a frozen weight."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)
    return model


def test_what_is_trained_beside_the_optimizer_may_have_no_gradient() -> None:
    model = network()
    engine = engine_of(model, SGD(model[1].parameters(), lr=0.1))
    others = tensors.unstepped(engine)
    assert [name for name, _ in others] == ["0.bias"]
    tensors.check_unstepped(others)
    model[0].bias.grad = torch.zeros(3)
    with pytest.raises(ConfigurationError, match="^0.bias has a gradient and is in no exchange"):
        tensors.check_unstepped(others)


def test_a_parameter_without_a_gradient_has_zeros_in_a_step_of_a_group() -> None:
    model = network()
    model[1].weight.grad = torch.ones(1, 3)
    engine = engine_of(model, SGD(model.parameters(), lr=0.1))
    assert [each.tolist() for each in tensors.step_gradients(engine)] == [[0.0] * 3, [[1.0] * 3], [0.0]]
    assert model[0].weight.grad is None, "it is frozen"
    engine.optimizer.averaged_gradients = {1: [torch.ones(1)], 0: [torch.zeros(2), torch.zeros(1)], 2: None}
    assert [each.tolist() for each in tensors.step_gradients(engine)] == [[0.0] * 2, [0.0], [1.0]]


def test_a_parameter_has_the_first_master_of_its_group() -> None:
    model, masters = network(), [Parameter(torch.zeros(1)) for _ in range(3)]
    assert tensors.masters_of(SimpleNamespace()) is None
    groups = [[model[0].bias], [model[1].weight, model[1].bias]]
    stepped = [{"params": masters[:1]}, {"params": masters[1:]}]
    found = tensors.masters_of(SimpleNamespace(bit16_groups=groups, param_groups=stepped))
    assert found is not None and set(found) == {model[0].bias, model[1].weight, model[1].bias}
    for parameter, number in ((model[0].bias, 0), (model[1].weight, 1), (model[1].bias, 1)):
        assert found[parameter][0] is masters[number] and found[parameter][1] == 0


@pytest.mark.parametrize(("value", "finite"), [(1e30, True), (math.nan, False), (math.inf, False), (-math.inf, False)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_is_not_finite_where_one_number_of_one_gradient_is_not(value: float, finite: bool, sparse: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2, sparse=sparse), nn.Linear(3, 1))
    engine = engine_of(model, SimpleNamespace())
    assert not tensors.has_nonfinite_step(engine), "without a gradient"
    model[0].weight.grad = torch.ones(3, 2)
    dense = torch.zeros(4, 2)
    dense[2, 1] = value
    model[1].weight.grad = dense.to_sparse(1) if sparse else dense
    assert tensors.has_nonfinite_step(engine) is not finite
    engine.optimizer.bit16_groups = [[model[0].weight]]
    assert not tensors.has_nonfinite_step(engine), "the optimizer looks itself"
    assert tensors.all_finite([torch.ones(2), dense.half() if value != 1e30 else dense]) is finite


def test_masters_are_looked_at_and_rounded_where_a_replica_has_them() -> None:
    weight = Parameter(torch.full((2,), 1.0, dtype=torch.bfloat16))
    master = torch.full((2,), 2.0)
    replica = MasterReplica([("weight", weight)], [(0, master)])
    plain = TensorReplica([("weight", Parameter(torch.ones(2)))])
    for each in (replica, plain):
        tensors.round_masters(each)
    assert weight.tolist() == [2.0, 2.0]
    for each in (replica, plain):
        tensors.check_masters(each)


def test_a_replica_is_of_partitions_where_zero_divides_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = network(), list[Any]()

    def partitioned(named: list[tuple[str, Parameter]], rank: int) -> Any:
        made.append(([name for name, _ in named], rank))
        return SimpleNamespace(named="partitions")

    monkeypatch.setattr(tensors, "PartitionedReplica", partitioned)
    engine = engine_of(model, SGD(model[1].parameters(), lr=0.1), divided=True)
    assert vars(tensors.replica_of(engine, 2)) == {"named": "partitions"}
    assert tensors.watched(engine) == "partitions"
    stepped = ["1.weight", "1.bias"]
    assert made == [(stepped, 2), (stepped, 0)]
    engine.zero_optimization_partition_weights = lambda: False
    assert [name for name, _ in tensors.watched(engine)] == ["0.bias", *stepped]


def test_a_rank_hands_over_its_part_of_each_master() -> None:
    model = nn.Linear(2, 3).to(torch.bfloat16)
    address = SimpleNamespace(start=4)
    part = torch.tensor([7.0, 8.0])
    for parameter, mapping in zip(
        model.parameters(), (SimpleNamespace(lp_fragment_address=address, hp_fragment=part), None), strict=True
    ):
        vars(parameter)["_hp_mapping"] = mapping
    engine = engine_of(model, SimpleNamespace(bit16_groups=[list(model.parameters())]))
    replica = tensors.replica_of(engine, 1)
    replica.read(flat := torch.zeros(9), shared=True)
    assert flat.tolist() == [0, 0, 0, 0, 7, 8, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.bfloat16, 'weight is bfloat16, and SGD has no fp32 master: give "bf16"'),
        (torch.float64, "weight is float64, and SGD has no fp32 master: make it float32"),
    ],
)
def test_one_parameter_of_another_type_is_named(kind: torch.dtype, said: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).to(kind))
    vars(model[0].bias)["_hp_mapping"] = None  # of another engine
    with pytest.raises(ConfigurationError, match=f"^1.{said}"):
        tensors.replica_of(engine_of(model, SGD(model.parameters(), lr=0.1)), 0)


def test_in_zero_3_the_parts_of_all_ranks_are_the_whole_tensors_without_what_they_are_padded_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three ranks, with tensors of seven elements and of one: the last ranks have fewer, or none."""
    values = [torch.arange(1.0, 8.0), torch.tensor([9.0])]
    named = [(name, Parameter(value)) for name, value in zip("ab", values, strict=True)]
    whole = torch.zeros(8)
    for rank in range(3):
        parts = {}
        for (_, parameter), value, length in zip(named, values, (3, 1), strict=True):
            padded = torch.nn.functional.pad(value, (0, 3 * length - value.numel()), value=-1.0)
            parts[parameter] = padded[rank * length : (rank + 1) * length]
            vars(parameter)["ds_shape"] = value.shape
        monkeypatch.setattr(zero3, "safe_get_local_fp32_param", parts.__getitem__)
        monkeypatch.setattr(zero3, "safe_get_local_grad", lambda parameter, parts=parts: 10 * parts[parameter])
        replica = zero3.PartitionedReplica(named, rank)
        replica.read(whole)
        assert [part.numel() for part in replica.gradients()] == [[3, 1], [3, 0], [1, 0]][rank]
    assert whole.tolist() == [*range(1, 8), 9.0]
