"""Adasum as a communication hook of DistributedDataParallel, between real processes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.collective import AdasumState, adasum_hook
from tests.helpers.rank_cases import (
    GROUPS,
    Cases,
    Small,
    assert_is_the_tree,
    assert_same_bits,
    check_case,
    loss_of,
    members,
    place_in,
    raises,
    tree_of,
)

case = CASES = Cases()


def local_gradients(rank: int, steps: Sequence[int] = (0,), spare: bool = False) -> list[Tensor]:
    model = Small()
    for step in steps:
        loss_of(model, rank, step, spare).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def with_hook(size: int, **options: Any) -> DistributedDataParallel:
    """In buckets of about one tensor each."""
    model = DistributedDataParallel(Small(), process_group=GROUPS[size], bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
    model.register_comm_hook(AdasumState(GROUPS[size]), adasum_hook)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@case
def the_hook_combines_what_the_ranks_computed(rank: int) -> None:
    for size in filter(members, (2, 3)):
        model = with_hook(size, find_unused_parameters=True)
        tree = tree_of([local_gradients(each, spare=each == 1) for each in range(size)])
        for _ in range(3):  # the buckets are laid out anew after the first
            model.zero_grad()
            loss_of(model, place_in(size), spare=place_in(size) == 1).backward()
            assert_is_the_tree(gradients(model), tree, size)
            assert_same_bits(gradients(model), size)


@case
def the_hook_combines_what_was_accumulated(rank: int) -> None:
    if members(2):
        model = with_hook(2, find_unused_parameters=True, gradient_as_bucket_view=True)
        with model.no_sync():
            loss_of(model, place_in(2), 0, True).backward()
        loss_of(model, place_in(2), 1, True).backward()
        tree = tree_of([local_gradients(each, (0, 1), True) for each in range(2)])
        assert_is_the_tree(gradients(model), tree, "accumulated")


@case
def every_rank_learns_of_nan_in_the_hook(rank: int) -> None:
    if members(2):
        model = with_hook(2)
        loss = loss_of(model, place_in(2), 0, True) * (float("nan") if place_in(2) else 1.0)
        loss.backward()
        assert all(gradient.isnan().all() for gradient in gradients(model))


@case
def ranks_that_differ_agree_after_a_step(rank: int) -> None:
    if members(3):
        model = with_hook(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, place_in(3), step, True).backward()
            optimizer.step()
        assert_same_bits(list(model.parameters()), 3)
        assert not torch.equal(model.module.first.weight, Small().first.weight)


@case
def sparse_gradients_are_refused_by_the_hook(rank: int) -> None:
    if members(2):
        model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True), process_group=GROUPS[2])
        model.register_comm_hook(AdasumState(GROUPS[2]), adasum_hook)
        with raises("sparse=False"):
            model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("name", list(CASES))
def test_between_processes(name: str, results: dict[str, list[str]]) -> None:
    check_case(name, results)
