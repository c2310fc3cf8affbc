"""Passes over memory on several threads. The results do not depend on the number of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

PIECE = 1 << 16
"""Number of elements in a piece. Gradient, two moments, parameters and a temporary of so many are 1.25 MiB in fp32,
which a core's cache holds."""

# Hazard: MKL 2024, which comes with torch, chooses the code of a function at the first call in a process. Where two
# threads make this call at once, one may, rarely, get code of low accuracy: its square roots of a whole piece are 3e-4
# off (https://github.com/pytorch/pytorch/issues/188792). So the first ones are taken here, before there are threads.
for _dtype in (torch.float32, torch.float64):
    torch.ones(1, dtype=_dtype, device="cpu").sqrt()

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Threads:
    """The thread pool of this process, which starts when it is needed.

    torch's own threads synchronise after every operation, and share no operation of fewer than 32,768 elements; these
    threads synchronise once a pass.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count = 1
        self._started = 0
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._started < self.count:
            # one torch thread in each: with more, every operation would synchronise with torch's threads as well
            self._pool = ThreadPoolExecutor(self.count, "pass", initializer=torch.set_num_threads, initargs=(1,))
            self._started = self.count
        return self._pool


_threads = _Threads()


def set_threads(count: int) -> None:
    """Sets how many threads the next passes may use: at least 1, the default, which uses the caller's thread alone."""
    _threads.count = count


def thread_count() -> int:
    """Returns how many threads passes may use now."""
    return _threads.count


def forget_threads() -> None:
    """Resets the threads in a forked process, which has none of its parent's threads, neither these nor torch's."""
    _threads.reset()
    torch.set_num_threads(1)


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Returns ``[function(item) for item in items]``, computed on several threads, each with a run of neighbours.

    Hazard: the calls run at the same time, so each must write only what no other reads or writes.
    """
    count = min(_threads.count, len(items))
    if count <= 1:
        return [function(item) for item in items]
    pool = _threads.pool()
    runs = [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]
    futures = [pool.submit(lambda run: [function(item) for item in run], run) for run in runs]
    wait(futures)  # for all, before an error of one is raised: the caller may write to the same memory then
    return list(chain.from_iterable(future.result() for future in futures))


def pairs(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cuts two flat vectors of the same size into pairs of pieces."""
    return list(zip(cut(first), cut(second), strict=True))


def cut(flat: Tensor) -> Sequence[Tensor]:
    """Cuts a flat vector into pieces; on a GPU it is one piece, since each operation there takes a kernel's launch."""
    return flat.split(PIECE) if flat.is_cpu else [flat]


def copy_in_threads(
    destination: Tensor, source: Tensor, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """Does ``copy(destination, source)`` for flat vectors, a part on each thread."""
    size = max(1, -(-destination.numel() // (_threads.count if destination.is_cpu else 1)))
    in_threads(lambda pair: copy(*pair), list(zip(destination.split(size), source.split(size), strict=True)))


def step_in_threads(optimizer: Optimizer) -> None:
    """Does ``optimizer.step()`` on several threads, for an optimizer that steps each of its tensors by itself."""
    count = min(_threads.count, max(len(group["params"]) for group in optimizer.param_groups))
    if count <= 1 or not optimizer.param_groups[0]["params"][0].is_cpu:
        optimizer.step()
        return
    parts = [_part(optimizer, n, count) for n in range(count)]
    in_threads(lambda part: part.step(), parts)
    for group, stepped in zip(optimizer.param_groups, parts[-1].param_groups, strict=True):
        # Some optimizers compute values once a step and keep them in the group, the same in every part. The last part
        # has a tensor of every group, however few a group has.
        group.update({key: value for key, value in stepped.items() if key != "params"})


def _part(optimizer: Optimizer, number: int, count: int) -> Any:
    """Returns a copy of the optimizer with the same state, which has only one thread's tensors of every group.

    The optimizer may have a class of its own with its own ``step``, for which there is no type.
    """
    part = copy(optimizer)
    part.param_groups = [dict(group) for group in optimizer.param_groups]
    for group in part.param_groups:
        size = len(group["params"])
        group["params"] = group["params"][size * number // count : size * (number + 1) // count]
    return part
