"""Passes over memory on several threads. What they compute does not depend on how many threads there are."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

PIECE = 1 << 16
"""Elements of a piece: gradient, two moments, parameters and a temporary of them are 1.25 MiB in fp32, which a core's
cache holds."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Threads:
    """The threads of this process, which start when they are needed.

    torch's own threads meet after every operation, and share none that is smaller than 32,768 elements; these meet once
    a pass.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count = 1
        self._started = 0
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._started < self.count:
            # a thread that also had torch's threads would have each of its operations meet with those
            self._pool = ThreadPoolExecutor(self.count, "pass", initializer=torch.set_num_threads, initargs=(1,))
            self._started = self.count
        return self._pool


_threads = _Threads()


def set_threads(count: int) -> None:
    """How many threads the next passes may use; from 1, which is the default and uses the caller's alone."""
    _threads.count = count


def thread_count() -> int:
    """How many threads passes may use now."""
    return _threads.count


def forget_threads() -> None:
    """In a process that was forked: its parent's threads are not in it, neither these nor torch's own."""
    _threads.reset()
    torch.set_num_threads(1)


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``[function(item) for item in items]``, where neighbours are computed by the same thread.

    Hazard: the calls run at the same time, so each must write only what no other reads or writes.
    """
    count = min(_threads.count, len(items))
    if count <= 1:
        return [function(item) for item in items]
    pool = _threads.pool()
    runs = [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]
    futures = [pool.submit(lambda run: [function(item) for item in run], run) for run in runs]
    wait(futures)  # all of them, before an error of one is raised: the caller may then write what they write
    return list(chain.from_iterable(future.result() for future in futures))


def pairs(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two flat vectors of the same size, in pieces."""
    return list(zip(first.split(PIECE), second.split(PIECE), strict=True))


def copy_in_threads(
    destination: Tensor, source: Tensor, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """``copy(destination, source)`` for flat vectors, each thread a part."""
    size = max(1, -(-destination.numel() // _threads.count))
    in_threads(lambda pair: copy(*pair), list(zip(destination.split(size), source.split(size), strict=True)))


def step_in_threads(optimizer: Optimizer) -> None:
    """``optimizer.step()`` for an optimizer that takes each of its tensors by itself."""
    count = min(_threads.count, max(len(group["params"]) for group in optimizer.param_groups))
    if count <= 1:
        optimizer.step()
        return
    parts = [_part(optimizer, n, count) for n in range(count)]
    in_threads(lambda part: part.step(), parts)
    for group, stepped in zip(optimizer.param_groups, parts[-1].param_groups, strict=True):
        # Some optimizers keep what they have computed once a step in the group, the same in every part. The last part
        # has a tensor of every group, however few a group has.
        group.update({key: value for key, value in stepped.items() if key != "params"})


def _part(optimizer: Optimizer, number: int, count: int) -> Any:
    """An optimizer with the same state that has every group's tensors of one thread only.

    Its class may be any, and may have a ``step`` of its own, for which there is no type.
    """
    part = copy(optimizer)
    part.param_groups = [dict(group) for group in optimizer.param_groups]
    for group in part.param_groups:
        size = len(group["params"])
        group["params"] = group["params"][size * number // count : size * (number + 1) // count]
    return part
