"""Tensors without a gradient, against torch's own optimizers, for which their ``grad`` is None."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.algorithms.missing import HiddenGradients, clear, elements_of, missing_here, missing_of, tensors_of
from fairseq_async.algorithms.pieces import Pieces, pieces
from fairseq_async.algorithms.threads import PIECE, forget_threads, set_threads

SIZES = [PIECE + 3, 5, 0, 7, 2 * PIECE, 11]  # of 6 tensors; a step takes them in pieces that go over their bounds
# of each step: the missing tensors of its two gradients; the first misses nothing, and a moment is there
STEPS = [(0, 0), (0b000010, 0b000010), (0b111101, 0b111100), (0b000010, 0), (0b111111, 0b101011), (0b010001, 0b110001)]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda given: Adam(given, lr=0.01, weight_decay=0.1),
    "AdamW, amsgrad": lambda given: AdamW(given, lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": lambda given: SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda given: Adagrad(given, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "Adadelta": lambda given: Adadelta(given, lr=0.1, weight_decay=0.1),
    "Adamax": lambda given: Adamax(given, lr=0.01, weight_decay=0.1),
    "NAdam": lambda given: NAdam(given, lr=0.01, weight_decay=0.1),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    set_threads(request.param)
    yield
    forget_threads()


def accumulation(flat: Tensor, make: Callable[[Any], Optimizer], count: int, **options: Any) -> HybridAccumulation:
    views = [Parameter(view) for view in flat.split(SIZES)]
    return HybridAccumulation(make(pieces(flat)), count, tensors=views, elementwise=True, **options)


def accumulation_of_whole(flat: Tensor, make: Callable[[Any], Optimizer]) -> HybridAccumulation:
    """As on a GPU, where the optimizer steps the whole vector."""
    views = [Parameter(view) for view in flat.split(SIZES)]
    rule = HybridAccumulation(make([Parameter(flat)]), 1, tensors=views, elementwise=True)
    rule._pieces = Pieces(rule.optimizer, PIECE)
    rule._hidden = HiddenGradients(rule._pieces, views)
    return rule


def update(delta: Tensor, missing: int) -> Update:
    return Update(0, 0, 0, 1.0, clear(delta.clone(), elements_of(missing, SIZES)), missing=missing)


def plain_step(plain: list[Parameter], optimizer: Optimizer, deltas: list[Tensor], masks: tuple[int, ...]) -> None:
    """As DistributedDataParallel: the mean, and None where every gradient is None."""
    updates = [update(*each) for each in zip(deltas, masks, strict=True)]
    mean = updates[0].delta if len(updates) == 1 else updates[0].delta.lerp(updates[1].delta, 0.5)
    for number, (parameter, part) in enumerate(zip(plain, mean.split(SIZES), strict=True)):
        parameter.grad = None if all(mask >> number & 1 for mask in masks) else part.clone()
    if len(updates) == 1:  # the norm of a mean is summed in another order
        torch.nn.utils.clip_grad_norm_(plain, 100.0)
    optimizer.step()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_tensor_that_no_gradient_of_a_step_has_is_left_alone(make: Callable[[Any], Optimizer], count: int) -> None:
    """To the bit, also when the state goes on in a new server or the same: after each gradient, and so amid a step."""
    torch.manual_seed(0)
    ours = torch.randn(sum(SIZES))
    plain = [Parameter(part.clone()) for part in ours.split(SIZES)]
    clip_norm = 100.0 if count == 1 else 0.0
    rule, optimizer = accumulation(ours, make, count, clip_norm=clip_norm), make(plain)
    for number, masks in enumerate(STEPS):
        deltas = [torch.randn(sum(SIZES)) for _ in range(count)]
        for delta, mask in zip(deltas, masks, strict=False):
            rule.apply(ours, update(delta, mask))
            state = copy.deepcopy(rule.state_dict())
            if number % 3:
                ours = ours.clone()
                rule = accumulation(ours, make, count, clip_norm=clip_norm)
            rule.load_state_dict(state)
        plain_step(plain, optimizer, deltas, masks[:count])
        assert torch.equal(ours, torch.cat([parameter.data for parameter in plain]))


def test_without_missing_tensors_the_pieces_stay_as_they_are_and_a_state_may_be_older() -> None:
    flat = torch.zeros(sum(SIZES))
    rule = accumulation(flat, OPTIMIZERS["Adam"], 1)
    before = list(rule.optimizer.param_groups[0]["params"])
    rule.apply(flat, update(torch.ones(sum(SIZES)), 0))
    state = rule.state_dict()
    assert state["pieces"] is None and state["missing"] == []
    assert all(a is b for a, b in zip(before, rule.optimizer.param_groups[0]["params"], strict=True))
    del state["pieces"], state["missing"]
    rule.apply(flat, update(torch.ones(sum(SIZES)), 0b10))
    assert len(rule.optimizer.param_groups[0]["params"]) > len(before)
    rule.load_state_dict(state)
    assert len(rule.optimizer.param_groups[0]["params"]) == len(before)
    other = accumulation(anew := flat.clone(), OPTIMIZERS["Adam"], 1)
    other.load_state_dict(copy.deepcopy(state))
    for missing in (0, 0b10):
        assert rule.apply(flat, update(torch.full([sum(SIZES)], -2.0), missing)) is True
        other.apply(anew, update(torch.full([sum(SIZES)], -2.0), missing))
        assert torch.equal(flat, anew)


def test_pieces_of_a_state_become_those_that_were_built() -> None:
    flat = torch.ones(8)
    own = Pieces(Adam([Parameter(flat[:5]), Parameter(flat[5:])], lr=0.1), longest=3)
    for piece in own.all:
        piece.grad = torch.ones(piece.numel())
    own._optimizer.step()
    state = own.state_dict()
    assert [part["exp_avg"].numel() for part in state["state"].values()] == [3, 2, 3]
    own.load_state_dict(state, own.sizes())
    assert [piece.numel() for piece in own.all] == [5, 3] and own.sizes() is None


def test_the_optimizer_may_have_the_whole_vector_or_the_tensors_themselves() -> None:
    for cut in (lambda flat: [flat], lambda flat: [Parameter(part) for part in flat.split([1, 2])]):
        flat = torch.zeros(3)
        rule = HybridAccumulation(SGD(cut(flat), lr=1.0, weight_decay=1.0), 1, tensors=list(flat.split([1, 2])))
        rule.apply(flat, Update(0, 0, 0, 1.0, torch.tensor([1.0, 2.0, 3.0])))
        rule.apply(flat, Update(0, 1, 1, 1.0, torch.tensor([1.0, 0.0, 0.0]), missing=0b10))
        assert flat.tolist() == [-1.0, -2.0, -3.0]  # the first is −1 − (1 − 1)
        rule.apply(flat, Update(0, 2, 2, 1.0, torch.zeros(3), missing=0b11))
        assert flat.tolist() == [-1.0, -2.0, -3.0]


def test_of_which_tensors_and_elements_a_number_speaks() -> None:
    assert missing_of([None, 1.0, None]) == 0b101 and tensors_of(0b101) == [0, 2]
    assert missing_here(0b110101, slice(1, 5)) == 0b1010
    assert elements_of(0b101, [2, 3, 4]) == [slice(0, 2), slice(5, 9)] and elements_of(0, [2]) == []


@pytest.mark.parametrize("steps", [STEPS[:1], STEPS], ids=["none is missing", "some are missing"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1)], ids=["CPU to GPU", "GPU to CPU", "GPU to GPU"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_state_goes_on_in_a_server_on_another_device(
    make: Callable[[Any], Optimizer], order: tuple[int, int], steps: list[tuple[int, int]]
) -> None:
    """With the same bits; and pieces that have taken the same steps are one again where the whole vector is stepped."""
    torch.manual_seed(0)
    flat, builds = torch.randn(sum(SIZES)), (lambda flat, make: accumulation(flat, make, 1), accumulation_of_whole)
    rule = builds[order[0]](flat, make)
    for missing, _ in steps:
        rule.apply(flat, update(torch.randn(sum(SIZES)), missing))
    state = copy.deepcopy(rule.state_dict())
    on_cpu = accumulation(flat.clone(), make, 1)
    assert (state["pieces"] is None) == (len(steps) == 1), "as of a server on a CPU"
    on_cpu.load_state_dict(copy.deepcopy(state))
    assert all(part.numel() <= PIECE for part in on_cpu.optimizer.param_groups[0]["params"])
    other = builds[order[1]](anew := flat.clone(), make)
    other.load_state_dict(state)
    if order[1] and len(steps) == 1:
        assert len(other.optimizer.param_groups[0]["params"]) == 1
    for missing in (0, 0b010010):
        delta = torch.randn(sum(SIZES))
        rule.apply(flat, update(delta, missing))
        other.apply(anew, update(delta, missing))
        assert torch.equal(flat, anew)
