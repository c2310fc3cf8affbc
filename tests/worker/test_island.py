"""Ranks of an island take parameters of one version."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fairseq_async.exchange import SharedMemory
from fairseq_async.worker.connection.island import IslandClient, _share_slot
from fairseq_async.worker.start.context import WorkerContext


def test_ranks_copy_what_is_published_or_all_the_same_from_the_slot_where_the_server_publishes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SharedMemory.create(2, 1)
    memory.allocate_slot(0)
    client: Any = SimpleNamespace(memory=SimpleNamespace(shared=memory, remote=False), worker=0)
    other = IslandClient(None, WorkerContext(rank=1, island_size=2))
    other._size = 2
    versions: Iterator[int] = iter([1, 2, 2, 2])  # as rank 0 has broadcast them

    def broadcast(*_: object) -> int:
        other._attach_slot(_share_slot(client, 2))
        return next(versions)

    monkeypatch.setattr(other, "_broadcast_answer", broadcast)
    monkeypatch.setattr(other, "_barrier", lambda: None)
    monkeypatch.setattr(other, "on_any_rank", lambda flag: flag)
    taken: list[Tensor] = []
    memory.slot(0).fill_(2.0)  # rank 0 has put version 2 there
    for published, version in ((1.0, 1), (3.0, 2)):
        memory.publish(torch.full((2,), published), int(published))
        assert other.pull(lambda flat: taken.append(flat.clone())) == version
    assert [cast(list[float], each.tolist()) for each in (taken[0], taken[-1])] == [[1.0, 1.0], [2.0, 2.0]]
    memory.publish(torch.full((2,), 2.0), 2)
    memory.slot(0).fill_(2.5)  # where rank 0 has parameters ahead
    assert other.pull(lambda flat: taken.append(flat.clone()), look_ahead=0.5, starts=True) == 2
    assert taken[-1].tolist() == [2.5, 2.5]
    memory.close()


def test_each_rank_copies_once_what_is_published_also_where_the_server_publishes_meanwhile() -> None:
    """A copy of a model in ZeRO 3 makes collective calls, of which all ranks make as many."""
    memory = SharedMemory.create(2, 1)
    memory.allocate_slot(0)
    rank, calls = IslandClient(None, WorkerContext(rank=1, island_size=2)), list[list[float]]()
    rank._slot = memory.slot(0)

    def copy(flat: Tensor, publishes: bool) -> None:
        calls.append(flat.tolist())
        if publishes:
            memory.publish(torch.full((2,), 2.0), 2)

    assert rank._copy_published(partial(copy, publishes=False)) == -1, "there is nothing yet"
    rank._memory = memory
    memory.publish(torch.ones(2), 1)
    assert rank._copy_published(partial(copy, publishes=False)) == 1
    assert rank._copy_published(partial(copy, publishes=True)) == -1
    with memory.publication(3):
        assert rank._copy_published(partial(copy, publishes=False)) == -1, "it is not complete"
    assert rank._copy_published(partial(copy, publishes=False)) == 3
    assert len(calls) == 5
    memory.close()


def test_rank_0_reads_no_memory_of_a_server_that_is_gone() -> None:
    """Its second thread may have connected again after the other ranks were told where the slot is."""
    first, second, third = (SharedMemory.create(2, 1) for _ in range(3))
    client: Any = SimpleNamespace(memory=SimpleNamespace(shared=first, remote=False), worker=0, slot=torch.zeros(2))
    rank = IslandClient(client, WorkerContext(island_size=2))
    first.publish(torch.ones(2), 1)
    rank._attach_slot(_share_slot(client, 2))
    assert rank._copy_published(lambda flat: None) == 1
    client.memory.shared = second
    told = _share_slot(client, 2)
    client.memory.shared = third
    rank._attach_slot(told)
    assert rank._copy_published(lambda flat: None) == -1
    for memory in (first, second, third):
        memory.close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_slot_that_goes_over_the_network_is_the_only_one_of_memory_of_this_machine(remote: bool) -> None:
    shared = None if remote else SharedMemory.create(2, 3, publishes=False)
    client: Any = SimpleNamespace(memory=SimpleNamespace(shared=shared, remote=remote), worker=2)
    client.share = partial(setattr, client.memory, "shared")
    if shared is not None:
        shared.allocate_slot(2)
    ranks = [IslandClient(None, WorkerContext(rank=rank, island_size=3)) for rank in (1, 2)]
    for other in ranks:
        other._size = 2
        other._attach_slot(_share_slot(client, 2))
    ranks[0].slot.fill_(7.0)
    assert ranks[1].slot.tolist() == client.memory.shared.slot(0 if remote else 2).tolist() == [7.0, 7.0]
    client.memory.shared.close()
