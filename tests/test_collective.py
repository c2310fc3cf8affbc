"""Adasum and AdaScale between eight real processes over Gloo, which form groups of two to eight.

Starting the processes takes longest, so they start once and work through all the cases below; each case is a function
that every process calls, and a test that looks at what became of it.
"""

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_async.algorithms import AdaScaleGain, adasum
from fairseq_async.collective import AdaScale, AdasumState, DistributedAdasum, NodeAdasum, adasum_hook, shared_memory
from fairseq_async.collective.agreement import check_equal
from fairseq_async.collective.rank_states import RankStates
from fairseq_async.errors import ConfigurationError
from tests.conftest import Processes, command

RANKS = 8
SECONDS = 150  # for everything, on a machine that is busy with other things
CASES: dict[str, Callable[[int], None]] = {}
GROUPS: dict[int, dist.ProcessGroup] = {}  # by size; each holds the last ranks, so that ranks and places in it differ
COMBINE: dict[int, list[DistributedAdasum]] = {}  # in shared memory and in messages, by the size of the group


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


def place_in(size: int) -> int:
    """This process's rank in a group, negative outside."""
    return dist.get_rank() - (RANKS - size)


def members(size: int) -> bool:
    return place_in(size) >= 0


# What the processes do


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


def assert_is_the_tree(result: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], what: object) -> None:
    for index, (tensor, of_ranks) in enumerate(zip(result, zip(*inputs, strict=True), strict=True)):
        expected = adasum([each.double() for each in of_ranks])
        error = float((tensor.double() - expected).norm())
        assert error <= 100 * torch.finfo(tensor.dtype).eps * float(expected.norm()), (what, index, error)


def assert_same_bits(tensors: Sequence[Tensor], size: int) -> None:
    mine = torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=GROUPS[size])
    assert all(torch.equal(mine, each) for each in gathered)


def check(size: int, kind: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """In shared memory and in messages."""
    inputs = [gradients_of(rank, kind, sizes, dtype) for rank in range(size)]
    for combine in COMBINE[size]:
        result = [tensor.clone() for tensor in inputs[place_in(size)]]
        combine(result)
        assert_is_the_tree(result, inputs, (size, kind, dtype))
        assert_same_bits(result, size)
    return result


@case
def it_equals_the_tree_in_double_precision(rank: int) -> None:
    sizes = [3, 17_001, 0, 40_000, 1, 300]
    kinds = {
        torch.float32: ["random", "same", "orthogonal", "parallel", "tiny", "huge", "mixed", "missing"],
        torch.bfloat16: ["random", "same", "orthogonal", "tiny", "huge"],
        torch.float16: ["random", "same", "orthogonal"],
        torch.float64: ["random"],
    }
    for size in filter(members, (2, 3, 4, 5, 8)):
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
    for combine in COMBINE[RANKS]:
        result = [tensor.clone() for tensor in inputs[rank]]
        if rank % 3 == 0:  # end to end, as in a bucket
            result = list(torch.cat(result).split(sizes))
        elif rank % 3 == 1:  # with gaps
            result = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in result]
        combine(result)
        assert_is_the_tree(result, inputs, rank % 3)


@case
def a_mixture_of_types_and_a_second_call_with_other_tensors(rank: int) -> None:
    for sizes in ([5, 20_000], [70_000], [3], [80_000, 80_000]):
        inputs = [
            gradients_of(each, "random", sizes, torch.float32) + gradients_of(each, "same", sizes, torch.bfloat16)
            for each in range(RANKS)
        ]
        for combine in COMBINE[RANKS]:
            result = [tensor.clone() for tensor in inputs[rank]]
            combine(result)
            assert_is_the_tree(result, inputs, sizes)


@case
def nan_on_one_rank_is_nan_on_every_rank(rank: int) -> None:
    for bad in (float("nan"), float("inf")):
        for size, guilty in ((8, 5), (5, 4), (2, 0)):
            for combine in COMBINE[size] if members(size) else ():
                tensors = gradients_of(place_in(size), "random", [50_000, 10, 10], torch.float32)
                if place_in(size) == guilty:
                    tensors[0][123] = bad
                    tensors[1][1] = bad
                combine(tensors)
                assert tensors[0].isnan().all() and tensors[1].isnan().all() and tensors[2].isfinite().all()


@case
def shared_memory_is_used_here_and_left_where_one_rank_cannot_open_it(rank: int) -> None:
    inputs = [gradients_of(each, "random", [300, 20_000], torch.float32) for each in range(RANKS)]
    for stranger in (None, 3):
        if rank == stranger:
            shared_memory.opened = lambda *address: None  # as in another container
        combine, result = DistributedAdasum(), [tensor.clone() for tensor in inputs[rank]]
        combine(result)
        shared_memory.opened = OPENED
        assert_is_the_tree(result, inputs, stranger)
        assert combine.shared_memory is not None and combine.shared_memory.possible == (stranger is None)


OPENED = shared_memory.opened


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


LOCAL: dict[str, Any] = {"use_local_synchronization": True}


@contextmanager
def raises(words: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"no error about {words}")


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
    everyones = [{0: {"exp_avg": torch.full((3,), 0.1 * r)}, 1: {}} for r in range(1, RANKS)]
    mine = states.of_this_rank({0: {"exp_avg": torch.zeros(3), "step": 7}, 1: {}}, everyones, None)
    assert torch.equal(mine[0]["exp_avg"], torch.full((3,), 0.1 * rank)) and mine[0]["step"] == 7
    fewer = states.of_this_rank({0: {"exp_avg": torch.zeros(3), "step": 7}}, everyones[:1], None)
    assert torch.allclose(fewer[0]["exp_avg"], torch.full((3,), 0.05))
    states.average(None)
    assert torch.allclose(first[0]["exp_avg"], torch.full((3,), 0.1 * (RANKS - 1) / 2))


# DistributedDataParallel


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 60)
        self.spare = nn.Linear(6, 60)  # used by some ranks only

    def forward(self, values: Tensor, spare: bool = False) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(values)))
        return result + self.spare(values) if spare else result


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int = 0, spare: bool = False) -> Tensor:
    loss: Tensor = model(batch_of(rank, step), spare).square().mean()
    return loss


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
        inputs = [local_gradients(each, spare=each == 1) for each in range(size)]
        for _ in range(3):  # the buckets are laid out anew after the first
            model.zero_grad()
            loss_of(model, place_in(size), spare=place_in(size) == 1).backward()
            assert_is_the_tree(gradients(model), inputs, size)
            assert_same_bits(gradients(model), size)


@case
def the_hook_combines_what_was_accumulated(rank: int) -> None:
    if members(2):
        model = with_hook(2, find_unused_parameters=True, gradient_as_bucket_view=True)
        with model.no_sync():
            loss_of(model, place_in(2), 0, True).backward()
        loss_of(model, place_in(2), 1, True).backward()
        inputs = [local_gradients(each, (0, 1), True) for each in range(2)]
        assert_is_the_tree(gradients(model), inputs, "accumulated")


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


# AdaScale


@case
def the_gain_counts_ranks_and_accumulation(rank: int) -> None:
    size, accumulation = 4, 2
    if not members(size):
        return
    model = DistributedDataParallel(Small(), process_group=GROUPS[size])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adascale = AdaScale(optimizer, accumulation=accumulation, process_group=GROUPS[size])
    assert adascale.scale == 8
    expected = AdaScaleGain(8)
    for start in (0, 2, 4):
        single = []
        twin = Small()
        twin.load_state_dict(model.module.state_dict())
        for each in range(size):
            for step in (start, start + 1):
                loss = loss_of(twin, each, step, True)
                single.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))]))
        stacked = torch.stack(single).double()
        expected.update(stacked.square().sum(1).tolist(), float(stacked.mean(0).square().sum()))
        with model.no_sync():
            (loss_of(model, place_in(size), start, True) / 2).backward()
        (loss_of(model, place_in(size), start + 1, True) / 2).backward()
        adascale.step()
        adascale.zero_grad()
        assert abs(adascale.gain / expected.gain - 1) < 1e-4
    assert abs(adascale.gains.whole.variance / expected.variance - 1) < 1e-4 and adascale.gain > 1.05
    assert abs(adascale.scale_invariant_steps / expected.scale_invariant_steps - 1) < 1e-4
    assert_same_bits([torch.tensor([adascale.gain]), *model.parameters()], size)


@case
def sums_over_unequal_batches_are_weighted_by_their_tokens(rank: int) -> None:
    """Against σ̂² = G/(G−1)·(Σ w_i|g_i|² − |ḡ|²), of a batch of the mean size."""
    size, tokens = 3, {0: (4.0, 0.0), 1: (2.0, 5.0), 2: (3.0, 6.0)}
    if not members(size):
        return
    model = Small()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2, process_group=GROUPS[size])
    single, weights = [], []
    for each in range(size):
        for step, count in enumerate(tokens[each]):
            if count:
                gradients = torch.autograd.grad(loss_of(model, each, step, True), list(model.parameters()))
                single.append(torch.cat([g.flatten() for g in gradients]).double())
                weights.append(count / 20)
    for step, count in enumerate(tokens[place_in(size)]):
        adascale.begin_pass(count)
        (loss_of(model, place_in(size), step, True) * count * 512).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=GROUPS[size])
    adascale.measure_sums(sum(tokens[place_in(size)]), factor=1 / (20 * 512), loss_scale=512)
    mean = torch.stack([w * g for w, g in zip(weights, single, strict=True)]).sum(0)
    weighted = sum(w * float(g.square().sum()) for w, g in zip(weights, single, strict=True))
    variance = 5 / 4 * (weighted - float(mean.square().sum()))
    assert abs(adascale.gains.whole.variance / variance - 1) < 1e-4
    assert abs(adascale.gains.whole.square_mean / (float(mean.square().sum()) - variance / 5) - 1) < 1e-4
    assert adascale.gains.whole.scale == 5.0


@case
def nan_on_one_rank_keeps_the_averages_of_all_ranks_as_they_are(rank: int) -> None:
    if members(2):
        model = DistributedDataParallel(Small(), process_group=GROUPS[2])
        adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), process_group=GROUPS[2])
        (loss_of(model, place_in(2), 0, True) * (float("nan") if place_in(2) else 1.0)).backward()
        adascale.measure()
        assert adascale.gains.whole.estimates == 0 and adascale.gain == 1.0


@case
def z_a_rank_that_is_gone_is_an_error_on_the_others(rank: int) -> None:
    """Named to be the last one."""
    if place_in(2) == 0:
        try:
            COMBINE[2][0]([torch.ones(100_000)])
        except RuntimeError:
            return
        raise AssertionError("no error")


# How they are started


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS / 3))
    for size in (1, 2, 3, 4, 5, 8):
        group = dist.new_group(list(range(RANKS - size, RANKS)))
        GROUPS[size] = group
        if size > 1 and members(size):
            COMBINE[size] = [DistributedAdasum(group, shared_memory=shared) for shared in (True, False)]
    try:
        for name, function in sorted(CASES.items(), key=lambda item: item[0].startswith("z_")):
            dist.barrier()
            results[name] = "not finished"
            if name.startswith("z_") and rank == RANKS - 1:
                results[name] = ""
                break
            function(rank)
            gc.collect()
            results[name] = ""
    except Exception:
        results[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    # A Gloo process that used DistributedDataParallel may abort at its end, and one rank is gone in any case.
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each case came to on each rank: nothing, or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # which imports torch once
    processes = [context.Process(target=work, args=(rank, folder), daemon=True) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = [json.loads(path.read_text()) if path.exists() else {} for path in (folder / f"{r}.json" for r in range(8))]
    return {name: [of_rank.get(name, "not reached") for of_rank in found] for name in CASES}


@pytest.mark.parametrize("name", list(CASES))
def test_between_processes(name: str, results: dict[str, list[str]]) -> None:
    failures = {rank: text for rank, text in enumerate(results[name]) if text}
    if own := {rank: text for rank, text in failures.items() if "gloo/transport" not in text}:
        failures = own  # the others only lost their connections to these
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())


def test_the_example_of_the_document_runs(processes: Processes, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "adasum.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    blocks = [block.split("```")[0] for block in text.split("```python\n")]
    script.write_text(next(block for block in blocks if "init_process_group" in block))
    code, output = processes.run([command("torchrun"), "--standalone", "--nproc-per-node", 2, script])
    assert code == 0, output
