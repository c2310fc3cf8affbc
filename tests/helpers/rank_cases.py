"""Cases that eight real processes over Gloo work through, in groups of two to eight.

Starting the processes takes longest, so they start once for all the cases of a module; each case is a function that
every process calls, and a test that looks at what became of it.
"""

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch._dynamo  # else each process imports it for its first optimizer, in more than a second
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from fairseq_async.algorithms import adasum
from fairseq_async.collective import DistributedAdasum
from fairseq_async.errors import ConfigurationError

RANKS = 8
SECONDS = 150  # for everything, on a machine that is busy with other things
GROUPS: dict[int, dist.ProcessGroup] = {}  # by size; each holds the last ranks, so that ranks and places in it differ
COMBINE: dict[int, list[DistributedAdasum]] = {}  # in shared memory and in messages, by the size of the group
Case = Callable[[int], None]


class Cases(dict[str, Case]):
    """The cases of a test module by their names; used as a decorator of each."""

    def __call__(self, function: Case) -> Case:
        self[function.__name__] = function
        return function


def place_in(size: int) -> int:
    """This process's rank in a group, negative outside."""
    return dist.get_rank() - (RANKS - size)


def members(size: int) -> bool:
    return place_in(size) >= 0


def tree_of(inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What the tensors of all ranks combine to, in fp64."""
    return [adasum([each.double() for each in of_ranks]) for of_ranks in zip(*inputs, strict=True)]


def assert_is_the_tree(result: Sequence[Tensor], tree: Sequence[Tensor], what: object) -> None:
    for index, (tensor, expected) in enumerate(zip(result, tree, strict=True)):
        error = float((tensor.double() - expected).norm())
        assert error <= 100 * torch.finfo(tensor.dtype).eps * float(expected.norm()), (what, index, error)


def assert_same_bits(tensors: Sequence[Tensor], size: int) -> None:
    mine = torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=GROUPS[size])
    assert all(torch.equal(mine, each) for each in gathered)


@contextmanager
def raises(words: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"no error about {words}")


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


def cases_of(module: str) -> dict[str, Case]:
    """Of a test module, which calls them ``CASES``; those whose names begin with "z_" come last."""
    cases: dict[str, Case] = import_module(module).CASES
    return dict(sorted(cases.items(), key=lambda item: item[0].startswith("z_")))


def work(rank: int, folder: Path, module: str) -> None:
    """One of the processes: works through the cases, and writes down what came of each."""
    gc.freeze()  # what was imported is looked through after no case
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
        for name, function in cases_of(module).items():
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


def run_cases(module: str, folder: Path) -> dict[str, list[str]]:
    """What each case came to on each rank: nothing, or a traceback."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # which imports torch once
    processes = [context.Process(target=work, args=(rank, folder, module), daemon=True) for rank in range(RANKS)]
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
    return {name: [of_rank.get(name, "not reached") for of_rank in found] for name in cases_of(module)}


def check_case(name: str, results: dict[str, list[str]]) -> None:
    """Fails where a rank has."""
    failures = {rank: text for rank, text in enumerate(results[name]) if text}
    if own := {rank: text for rank, text in failures.items() if "gloo/transport" not in text}:
        failures = own  # the others only lost their connections to these
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
