"""The server's passes over memory take the cores on which no worker computes."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fairseq_async.algorithms import Update, threads
from fairseq_async.errors import HalfAppliedError
from fairseq_async.method.spec import ServerSettings
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.connections import Peer, use_idle_cores
from fairseq_async.server.shards.rule import ShardedRule
from fairseq_async.worker.start import server_process

CORES = 4


@dataclass
class OnAMachine:
    """A peer of which only the machine counts."""

    remote: bool = False


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(CORES)))
    yield
    threads.set_threads(1)


def used(waiting: list[int], remote: list[int], shards: int = 1) -> int:
    """Threads with three workers, of which some wait and some are on other machines."""
    membership = Membership(3, 0.0)
    for worker in range(3):
        membership.connect(worker, f"process {worker}", 0.0)
    for worker in waiting:
        membership.wait(worker, "push")
    peers = {worker: cast(Peer, OnAMachine(worker in remote)) for worker in range(3)}
    use_idle_cores(peers, membership, ServerSettings(server_shards=shards))
    return threads.thread_count()


def test_a_worker_that_computes_keeps_its_core() -> None:
    assert used(waiting=[0], remote=[]) == 2


def test_a_step_for_which_all_wait_has_every_core() -> None:
    assert used(waiting=[0, 1, 2], remote=[]) == CORES


def test_workers_of_other_machines_take_no_core_of_this_one() -> None:
    assert used(waiting=[0], remote=[1, 2]) == CORES


def test_there_is_one_thread_when_no_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert used(waiting=[], remote=[]) == 1


@pytest.mark.parametrize(("cores", "shards", "threads"), [(16, 1, 4), (16, 3, 12), (16, 8, 16)])
def test_a_process_takes_no_more_cores_than_it_gains_from(
    monkeypatch: pytest.MonkeyPatch, cores: int, shards: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert used(waiting=[0, 1, 2], remote=[], shards=shards) == threads


@pytest.mark.parametrize(("workers", "threads"), [(1, "3"), (3, "1"), (9, "1")])
def test_the_servers_optimizer_uses_the_cores_that_its_workers_leave(workers: int, threads: str) -> None:
    assert server_process._threads(workers) == {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("fails", [False, True])
def test_the_shards_of_this_machine_share_its_threads_for_the_time_of_an_update(fails: bool) -> None:
    given = list[int]()

    def call(others: object, method: object, *arguments: Any) -> list[float]:
        given.append(arguments[6])
        threads.set_threads(arguments[6])  # as the part of this process does
        if fails:
            raise HalfAppliedError("a shard is gone")
        return [0.5, 0.5, 0.5]

    rule: Any = SimpleNamespace(_share=lambda update: False, _here=["a shard"] * 2, others=["a shard"] * 3, _call=call)
    threads.set_threads(7)
    update = Update(0, 3, 2, 1.0, torch.zeros(1))
    with pytest.raises(HalfAppliedError) if fails else nullcontext():
        assert ShardedRule.apply(rule, torch.zeros(1), update) == 0.5
    assert given == [2] and threads.thread_count() == 7
