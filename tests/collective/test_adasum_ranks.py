"""Adasum between eight real processes over Gloo: in shared memory, in messages, between nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_async.algorithms import adasum
from fairseq_async.collective import AdasumState, DistributedAdasum, NodeAdasum
from fairseq_async.collective.adasum import RankStates, shared_memory
from fairseq_async.collective.agreement import check_equal
from tests.helpers.commands import ROOT, Processes, command
from tests.helpers.rank_cases import (
    COMBINE,
    GROUPS,
    RANKS,
    Cases,
    assert_is_the_tree,
    assert_same_bits,
    check_case,
    members,
    place_in,
    raises,
    tree_of,
)

case = CASES = Cases()


LOCAL: dict[str, Any] = {"use_local_synchronization": True}


def gradients_of(rank: int, kind: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0 if kind == "same" else 1000 + rank)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    for index, tensor in enumerate(tensors):
        if kind == "orthogonal":
            tensor[torch.arange(tensor.numel()) % RANKS != rank] = 0
        elif kind == "parallel":
            tensor.copy_(torch.linspace(-1, 2, tensor.numel()) * (-1.5) ** rank)
        elif kind == "missing":
            tensor.mul_((rank + index) % 3 > 0)
        tensor.mul_({"tiny": 1e-38, "huge": 1e19, "mixed": (1e-38, 1e19, 1.0)[(rank + index) % 3]}.get(kind, 1.0))
    return [tensor.to(dtype) for tensor in tensors]


def check(size: int, kind: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """In shared memory and in messages: the first member has the tree's result, and the others the same bits."""
    place = place_in(size)
    own = gradients_of(place, kind, sizes, dtype)
    tree = tree_of([gradients_of(rank, kind, sizes, dtype) for rank in range(size)]) if place == 0 else []
    for combine in COMBINE[size]:
        result = [tensor.clone() for tensor in own]
        combine(result)
        if place == 0:
            assert_is_the_tree(result, tree, (size, kind, dtype))
        assert_same_bits(result, size)
    return result


@case
def it_equals_the_tree_in_double_precision(rank: int) -> None:
    sizes = [3, 17_001, 0, 40_000, 1, 300]
    kinds = {
        torch.float32: ["random", "same", "orthogonal", "parallel", "tiny", "huge", "mixed", "missing"],
        torch.bfloat16: ["random", "same", "huge"],
        torch.float16: ["random", "orthogonal"],
        torch.float64: ["random"],
    }
    for size in filter(members, (2, 3, 5, 8)):
        for dtype, of_dtype in kinds.items():
            for kind in of_dtype:
                result = check(size, kind, sizes, dtype)
                if kind == "same":
                    expected = gradients_of(0, kind, sizes, dtype)
                    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@case
def tensors_of_any_sizes_are_combined_each_for_itself(rank: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for size in [2, 3, 5, 8, 2, 3, 5, 8]:
        sizes = torch.randint(0, 12, (9,), generator=generator).square().mul(200).tolist()
        if members(size):
            check(size, "random", sizes, torch.float32)
    check(8, "random", [1], torch.float32)  # most ranks hold nothing at the end
    check(8, "random", [1 << 16], torch.float32)


@case
def where_tensors_lie_in_memory_does_not_matter(rank: int) -> None:
    sizes = [20_000, 30_000, 200, 100]
    inputs = [gradients_of(each, "random", sizes, torch.float32) for each in range(RANKS)]
    expected = tree_of(inputs)
    for combine in COMBINE[RANKS]:
        result = [tensor.clone() for tensor in inputs[rank]]
        if rank % 3 == 0:  # end to end, as in a bucket
            result = list(torch.cat(result).split(sizes))
        elif rank % 3 == 1:  # with gaps
            result = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in result]
        combine(result)
        assert_is_the_tree(result, expected, rank % 3)


@case
def a_mixture_of_types_and_a_second_call_with_other_tensors(rank: int) -> None:
    for sizes in ([5, 20_000], [70_000], [3], [80_000, 80_000]):
        inputs = [
            gradients_of(each, "random", sizes, torch.float32) + gradients_of(each, "random", sizes, torch.bfloat16)
            for each in range(RANKS)
        ]
        expected = tree_of(inputs)
        for combine in COMBINE[RANKS]:
            result = [tensor.clone() for tensor in inputs[rank]]
            combine(result)
            assert_is_the_tree(result, expected, sizes)


@case
def nan_on_one_rank_is_nan_on_every_rank(rank: int) -> None:
    for bad in (float("nan"), float("inf")):
        for size, guilty in ((8, 5), (5, 4), (2, 0)):
            for combine in COMBINE[size] if members(size) else ():
                tensors = gradients_of(place_in(size), "random", [20_000, 10, 10], torch.float32)
                if place_in(size) == guilty:
                    tensors[0][123] = bad
                    tensors[1][1] = bad
                combine(tensors)
                assert tensors[0].isnan().all() and tensors[1].isnan().all() and tensors[2].isfinite().all()


@case
def shared_memory_is_used_here_and_left_where_one_rank_cannot_open_it(rank: int) -> None:
    inputs = [gradients_of(each, "random", [300, 20_000], torch.float32) for each in range(RANKS)]
    expected = tree_of(inputs)
    for stranger in (None, 3):
        if rank == stranger:
            shared_memory.open_buffer = lambda *address: None  # as in another container
        combine, result = DistributedAdasum(), [tensor.clone() for tensor in inputs[rank]]
        combine(result)
        shared_memory.open_buffer = OPEN_BUFFER
        assert_is_the_tree(result, expected, stranger)
        assert combine.shared_memory is not None and combine.shared_memory.possible == (stranger is None)


OPEN_BUFFER = shared_memory.open_buffer


@case
def what_cannot_work_is_one_clear_line(rank: int) -> None:
    with raises("has one"):
        DistributedAdasum(GROUPS[1]) if rank == RANKS - 1 else AdasumState(dist.new_group([rank], **LOCAL))
    if not members(2):
        with raises("not a member"):
            DistributedAdasum(GROUPS[2])
    with raises("sparse=False"):
        DistributedAdasum()([torch.eye(2).to_sparse()])
    with raises("floating-point"):
        DistributedAdasum()([torch.zeros(2, dtype=torch.int64)])


@case
def nodes_are_averaged_and_then_combined(rank: int) -> None:
    """Nodes of three, three and two ranks, each rank's gradient a sum over rank + 1 tokens."""
    sizes, node = [3, 20_001, 40], rank // 3
    for dtype in (torch.float32, torch.bfloat16):
        combine = NodeAdasum(node=f"machine {node}")
        own = gradients_of(rank, "random", sizes, torch.float64)
        sums = [tensor * (rank + 1) for tensor in own]
        result = [(tensor * combine.share(rank + 1)).to(dtype) for tensor in sums]
        combine(result)
        nodes = [[r for r in range(RANKS) if r // 3 == n] for n in range(3)]
        means = [
            [sum((r + 1) * g[i] for r, g in of_node) / sum(r + 1 for r, _ in of_node) for i in range(len(sizes))]
            for of_node in ([(r, gradients_of(r, "random", sizes, torch.float64)) for r in ranks] for ranks in nodes)
        ]
        for index, tensor in enumerate(result):
            expected = adasum([mean[index] for mean in means])
            error = float((tensor.double() - expected).norm() / expected.norm())
            assert error <= 100 * torch.finfo(dtype).eps, (dtype, index, error)
        assert_same_bits(result, RANKS)
    with raises("all ranks are on one node"):
        NodeAdasum(node="the only one")


@case
def parameters_that_differ_are_named(rank: int) -> None:
    named = [("first", torch.full((3,), float("nan"))), ("second", torch.arange(4.0)), ("third", torch.ones(2, 2))]
    check_equal(named)
    changed = [(name, tensor.clone()) for name, tensor in named]
    if rank == 3:
        changed[1][1][:2] = changed[1][1][:2].flip(0)
    with raises("in 1 of 3 parameters, the first of them second"):
        check_equal(changed)
    with raises("different models"):
        check_equal(named[: 2 + (rank > 0)])


@case
def optimizer_states_are_gathered_and_averaged(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(rank))
    optimizer.step()
    states, first = RankStates(optimizer), optimizer.state_dict()["state"]
    states.gather(None)
    assert len(states.gathered) == (RANKS - 1 if rank == 0 else 0)
    if members(3):  # whose first rank is not the first of all
        states.gather(GROUPS[3])
        theirs = [RANKS - 2, RANKS - 1] if place_in(3) == 0 else []
        assert [round(float(each[0]["exp_avg"][0]), 4) for each in states.gathered] == [r / 10 for r in theirs]
    everyones = [{0: {"exp_avg": torch.full((3,), 0.1 * r)}, 1: {}} for r in range(1, RANKS)]
    mine = states.of_this_rank({0: {"exp_avg": torch.zeros(3), "step": 7}, 1: {}}, everyones, None)
    assert torch.equal(mine[0]["exp_avg"], torch.full((3,), 0.1 * rank)) and mine[0]["step"] == 7
    fewer = states.of_this_rank({0: {"exp_avg": torch.zeros(3), "step": 7}}, everyones[:1], None)
    assert torch.allclose(fewer[0]["exp_avg"], torch.full((3,), 0.05))
    one_more = [*everyones, {0: {"exp_avg": torch.full((3,), 0.1 * RANKS)}}]
    more = states.of_this_rank({0: {"exp_avg": torch.zeros(3), "step": 7}}, one_more, None)
    assert torch.allclose(more[0]["exp_avg"], torch.full((3,), 0.05 * RANKS))
    states.average(None)
    assert torch.allclose(first[0]["exp_avg"], torch.full((3,), 0.1 * (RANKS - 1) / 2))


@case
def z_a_rank_that_is_gone_is_an_error_on_the_others(rank: int) -> None:
    """Named to be the last one."""
    if place_in(2) == 0:
        try:
            COMBINE[2][0]([torch.ones(100_000)])
        except RuntimeError:
            return
        raise AssertionError("no error")


@pytest.mark.parametrize("name", list(CASES))
def test_between_processes(name: str, results: dict[str, list[str]]) -> None:
    check_case(name, results)


def test_the_example_of_the_document_runs(processes: Processes, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adasum.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    blocks = [block.split("```")[0] for block in text.split("```python\n")]
    script.write_text(next(block for block in blocks if "init_process_group" in block))
    code, output = processes.run([command("torchrun"), "--standalone", "--nproc-per-node", 2, script])
    assert code == 0, output
