"""Aji & Heafield 2019 on three numbers, and against a reference in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.pieces import pieces


def update(delta: list[float] | Tensor, weight: float = 1.0, worker: int = 0, sequence: int = 0) -> Update:
    return Update(worker, sequence, 0, weight, torch.as_tensor(delta, dtype=torch.float32))


def sgd(parameters: Tensor, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([parameters], lr=lr)


def test_it_steps_on_every_nth_update_with_the_mean_weighted_by_tokens() -> None:
    parameters = torch.zeros(3)
    rule = HybridAccumulation(sgd(parameters), updates_per_step=2)
    assert rule.apply(parameters, update([1.0, 0.0, 2.0], weight=30)) is False
    assert torch.equal(parameters, torch.zeros(3))
    assert rule.apply(parameters, update([5.0, 4.0, 2.0], weight=10)) is True
    assert torch.allclose(parameters, -torch.tensor([2.0, 1.0, 2.0]))
    assert rule.state_dict()["mean"] is None, "which takes room"


def test_one_update_per_step_gives_the_optimizer_the_gradient_unchanged_to_the_bit() -> None:
    torch.manual_seed(0)
    ours, plain = torch.randn(100), torch.zeros(100)
    plain.copy_(ours)
    rule = HybridAccumulation(torch.optim.Adam([ours], lr=0.01), updates_per_step=1)
    adam = torch.optim.Adam([plain], lr=0.01)
    for weight in (7.0, 3.0, 11.0, 1e-3):
        plain.grad = torch.randn(100)
        rule.apply(ours, update(plain.grad.clone(), weight))
        adam.step()
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_in_pieces_a_step_is_the_whole_models_to_the_bit(make: Any) -> None:
    """Also the norm by which it is clipped, which is that of the model's tensors."""
    torch.manual_seed(0)
    sizes = [100_003, 7, 50_001]
    ours = torch.randn(sum(sizes))
    plain = [torch.nn.Parameter(part.clone()) for part in ours.split(sizes)]
    cut = pieces(ours)
    assert len(cut) > 2 and len({piece.numel() for piece in cut}) == 2
    tensors = [torch.nn.Parameter(part) for part in ours.split(sizes)]
    rule = HybridAccumulation(make(cut, lr=0.01), 1, clip_norm=1.0, tensors=tensors)
    optimizer = make(plain, lr=0.01)
    for _ in range(3):
        gradient = torch.randn(sum(sizes))
        rule.apply(ours, update(gradient.clone()))
        for parameter, part in zip(plain, gradient.split(sizes), strict=True):
            parameter.grad = part.clone()
        torch.nn.utils.clip_grad_norm_(plain, 1.0)
        optimizer.step()
        assert torch.equal(ours, torch.cat([parameter.data for parameter in plain]))


def test_parameters_may_be_a_part_of_a_longer_vector() -> None:
    whole, second = torch.zeros(5), torch.zeros(5)
    rule = HybridAccumulation(sgd(whole[2:]), updates_per_step=2)
    rule.apply(whole[2:], update([2.0, 4.0, 6.0]))
    again = HybridAccumulation(sgd(second[2:]), updates_per_step=2)
    again.load_state_dict(rule.state_dict())
    for parameters, accumulation in ((whole, rule), (second, again)):
        accumulation.apply(parameters[2:], update([0.0, 0.0, 2.0]))
        assert parameters.tolist() == [0.0, 0.0, -1.0, -2.0, -4.0]


def test_nothing_of_one_step_is_left_in_the_next() -> None:
    parameters = torch.zeros(1)
    rule = HybridAccumulation(sgd(parameters), updates_per_step=2)
    for delta in (1e8, 1e8, 1.0, 1.0):
        rule.apply(parameters, update([delta]))
    assert parameters.item() == -(1e8 + 1.0) or parameters.item() == -1e8  # 1e8 + 1 rounds in fp32
    before = parameters.clone()
    rule.apply(parameters, update([0.0]))
    rule.apply(parameters, update([0.0]))
    assert torch.equal(parameters, before)


def test_clipping_is_of_the_sum_and_not_of_its_parts() -> None:
    parameters = torch.zeros(2)
    rule = HybridAccumulation(sgd(parameters), updates_per_step=2, clip_norm=1.0)
    rule.apply(parameters, update([10.0, 0.0]))
    rule.apply(parameters, update([-10.0, 0.6]))  # their mean, (0, 0.3), is short enough
    assert torch.allclose(parameters, torch.tensor([0.0, -0.3]))
    rule.apply(parameters, update([0.0, 30.0]))
    rule.apply(parameters, update([40.0, 0.0]))
    assert torch.allclose(parameters, torch.tensor([-0.8, -0.9]), atol=1e-5)


@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4), st.sampled_from([0.5, 1.0, 2.0]))
def test_clipping_is_torchs_to_the_bit(gradient: list[float], clip: float) -> None:
    """Whether it has something to do or not."""
    parameters, plain = torch.ones(4), torch.nn.Parameter(torch.ones(4))
    HybridAccumulation(sgd(parameters), 1, clip_norm=clip).apply(parameters, update(gradient))
    plain.grad = torch.tensor(gradient)
    torch.nn.utils.clip_grad_norm_(plain, clip)
    torch.optim.SGD([plain], lr=1.0).step()
    assert torch.equal(parameters, plain.data)


def test_an_update_without_tokens_counts_but_does_not_weigh() -> None:
    parameters = torch.zeros(1)
    rule = HybridAccumulation(sgd(parameters), updates_per_step=3)
    assert not rule.apply(parameters, update([0.0], weight=0))
    assert not rule.apply(parameters, update([4.0], weight=5))
    assert rule.apply(parameters, update([0.0], weight=0))
    assert parameters.item() == -4.0


def test_the_optimizer_may_see_the_flat_parameters_as_tensors() -> None:
    parameters = torch.zeros(6)
    views = [torch.nn.Parameter(parameters[:2]), torch.nn.Parameter(parameters[2:].view(2, 2))]
    rule = HybridAccumulation(torch.optim.SGD(views, lr=1.0), updates_per_step=1)
    rule.apply(parameters, update([1.0, 2, 3, 4, 5, 6]))
    assert torch.equal(parameters, -torch.arange(1.0, 7.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates_per_step": 0},
        {"updates_per_step": 1, "clip_norm": -1.0},
        {"updates_per_step": 1, "clip_norm": math.nan},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        HybridAccumulation(sgd(torch.zeros(1)), **wrong)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 5000)), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.5]),
)
def test_it_equals_the_papers_formula_in_float64(n: int, sent: list[tuple[float, int]], clip: float) -> None:
    parameters = torch.zeros(2)
    rule = HybridAccumulation(sgd(parameters, lr=0.1), n, clip_norm=clip)
    reference = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(sent) - n + 1, n):
        batch = sent[start : start + n]
        mean = sum(w * torch.tensor([g, 1.0], dtype=torch.float64) for g, w in batch) / sum(w for _, w in batch)
        reference -= 0.1 * mean * (min(1.0, clip / (float(mean.norm()) + 1e-6)) if clip else 1.0)
    announced = [rule.moves_parameters(ahead) for ahead in range(len(sent))]
    stepped = [rule.apply(parameters, update([g, 1.0], w)) for g, w in sent]
    assert stepped == announced == [(i + 1) % n == 0 for i in range(len(sent))]
    assert torch.allclose(parameters.double(), reference, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 2**31))
def test_stopping_and_going_on_changes_nothing(n: int, stop: int, seed: int) -> None:
    torch.manual_seed(seed)
    sent = [update(torch.randn(5), weight=float(i + 1)) for i in range(10)]

    def fresh() -> tuple[Tensor, HybridAccumulation]:
        parameters = torch.ones(5)
        return parameters, HybridAccumulation(torch.optim.Adam([parameters], lr=0.1), n, clip_norm=1.0)

    straight, rule = fresh()
    for each in sent:
        rule.apply(straight, each)
    first, rule = fresh()
    for each in sent[:stop]:
        rule.apply(first, each)
    second, resumed = fresh()
    second.copy_(first)
    resumed.load_state_dict(rule.state_dict())
    for each in sent[stop:]:
        resumed.apply(second, each)
    assert torch.equal(straight, second)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 5000)), min_size=1, max_size=7), max_size=6
    ),
)
def test_a_partial_step_is_as_much_of_a_step_as_it_has_gradients(n: int, rounds: list[list[tuple[float, int]]]) -> None:
    """A step of more gradients than N is one step."""
    parameters = torch.ones(1)
    optimizer = torch.optim.SGD([parameters], lr=0.1)
    rule = HybridAccumulation(optimizer, n, partial_steps=True)
    reference, steps = 1.0, 0.0
    for sent in rounds:
        rule.limit_round(len(sent))
        shares = [rule.apply(parameters, update([g], w)) for g, w in sent]
        share = min(1.0, len(sent) / n)
        reference -= 0.1 * share * sum(w * g for g, w in sent) / sum(w for _, w in sent)
        steps += share
        assert shares == [0.0] * (len(sent) - 1) + [share] and optimizer.param_groups[0]["lr"] == 0.1
    assert float(parameters) == pytest.approx(reference, rel=1e-5, abs=1e-5)


def test_without_partial_steps_a_round_of_fewer_updates_takes_a_whole_step() -> None:
    parameters = torch.zeros(1)
    rule = HybridAccumulation(sgd(parameters), 4)
    rule.limit_round(2)
    assert [rule.apply(parameters, update([g])) for g in (1.0, 3.0)] == [0.0, 1.0] and float(parameters) == -2.0
    rule.limit_round(9)
    assert rule.updates_per_step == 4


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_of_weight_0_alone_are_no_step(count: int) -> None:
    """Not even by the optimizer's momentum, which would move on; what comes after them is a step of its own."""
    parameters = torch.zeros(1)
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=1.0, momentum=0.5), count)
    for _ in range(count):
        rule.apply(parameters, update([2.0], weight=1))
    assert parameters.item() == -2.0
    for _ in range(count):
        assert rule.apply(parameters, update([5.0], weight=0)) == 0.0
    assert parameters.item() == -2.0 and rule.count == 0
    assert [rule.apply(parameters, update([1.0], weight=1)) for _ in range(count)][-1] == 1.0
    assert parameters.item() == -4.0


def test_gradients_left_from_a_run_of_whole_steps_go_with_the_first_round() -> None:
    """Two of four are left: the first round of four has six gradients, and the next ones have their own four."""
    whole = HybridAccumulation(sgd(torch.zeros(1)), 4)
    for gradient in (1.0, 1.0):
        whole.apply(torch.zeros(1), update([gradient]))
    parameters = torch.zeros(1)
    rule = HybridAccumulation(sgd(parameters), 4, partial_steps=True)
    rule.load_state_dict(whole.state_dict())
    rule.limit_round(4)
    assert [rule.apply(parameters, update([4.0])) for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    assert float(parameters) == -3.0  # the mean of 1, 1, 4, 4, 4 and 4
    assert [rule.apply(parameters, update([1.0])) for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    rule.limit_round(2)
    assert [rule.apply(parameters, update([1.0])) for _ in range(2)] == [0.0, 0.5]


def test_what_is_left_goes_with_the_first_round_also_where_neither_has_a_token() -> None:
    """Two of weight 0 are left and the first round has two of them: no later round waits for more than its own."""
    whole = HybridAccumulation(sgd(torch.zeros(1)), 4)
    for _ in range(2):
        whole.apply(torch.zeros(1), update([1.0], weight=0))
    parameters = torch.zeros(1)
    rule = HybridAccumulation(sgd(parameters), 4, partial_steps=True)
    rule.load_state_dict(whole.state_dict())
    rule.limit_round(2)
    assert [rule.apply(parameters, update([1.0], weight=0)) for _ in range(2)] == [0.0, 0.0]
    rule.limit_round(2)
    assert [rule.apply(parameters, update([1.0])) for _ in range(2)] == [0.0, 0.5]
