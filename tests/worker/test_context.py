"""Which worker and which of its ranks a process is, by what each launcher sets in its environment."""

import os
import signal

import pytest

from fairseq_async.environment import JOINS, MEETING, RANKS, SLOWDOWN, WORKER, WORKERS
from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.start.context import WorkerContext

OTHERS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = STORE | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """To which processes' ends this one was bound. The environment has no launcher's variables."""
    for name in (*OTHERS, WORKER, WORKERS, RANKS, SLOWDOWN, MEETING, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    found = list[tuple[int, int]]()
    monkeypatch.setattr(
        "fairseq_async.worker.start.context.end_with_parent", lambda number, parent: found.append((number, parent))
    )
    return found


@pytest.mark.parametrize(
    ("variables", "island_size", "expected", "is_bound"),
    [
        ({}, 1, WorkerContext(), False),
        ({WORKER: "1", WORKERS: "3", SLOWDOWN: "2.5"}, 1, WorkerContext(1, 3, 1, 2.5), True),
        (
            {WORKER: "2", WORKERS: "3", RANKS: "2,1,3", "RANK": "1"},
            3,
            WorkerContext(2, 3, 1, 1.0, rank=1, island_size=3, sizes=(2, 1, 3)),
            True,
        ),
        ({WORKER: "1", WORKERS: "3", MEETING: "x", SLOWDOWN: "1,4,9"}, 1, WorkerContext(1, 3, 1, 4.0), True),
        ({WORKER: JOINS}, 1, WorkerContext(joins=True), False),
        (
            {WORKER: JOINS, RANKS: "4", "RANK": "3"},
            1,
            WorkerContext(local_rank=3, rank=3, island_size=4, joins=True),
            True,
        ),
        (
            TORCHRUN | {SLOWDOWN: "1,4,9,16"},
            2,
            WorkerContext(2, 4, 1, 9.0, rank=1, island_size=2, several_machines=True, has_store=True),
            False,
        ),
        (TORCHRUN | {"LOCAL_SIZE": "8"}, 1, WorkerContext(5, 8, 1, has_store=True), False),
        (
            STORE | {"RANK": "3", "WORLD_SIZE": "4"},
            4,
            WorkerContext(0, 1, rank=3, island_size=4, has_store=True),
            False,
        ),
    ],
    ids=["none", "ours", "ours, ranks", "a job", "joins", "joins, ranks", "torchrun", "deepspeed", "one island"],
)
def test_a_process_finds_its_place_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
    bound: list[tuple[int, int]],
    variables: dict[str, str],
    island_size: int,
    expected: WorkerContext,
    is_bound: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert WorkerContext.find(island_size) == expected
    assert bound == ([(signal.SIGTERM, os.getppid())] if is_bound else [])


def test_ranks_are_counted_over_workers_of_unequal_size() -> None:
    each = [
        WorkerContext(worker, 3, rank=0, island_size=size, sizes=(2, 1, 3)) for worker, size in enumerate((2, 1, 3))
    ]
    assert [context.global_rank for context in each] == [0, 2, 3] and [context.ranks for context in each] == [6] * 3
    assert [context.share for context in each] == [1.0, 0.5, 1.5]
    equal = WorkerContext(2, 4, rank=1, island_size=2)
    assert (equal.global_rank, equal.ranks, equal.share) == (5, 8, 1.0)
    assert WorkerContext(4, 3, rank=1, island_size=2).global_rank == 3, "one that has joined has another's"


@pytest.mark.parametrize(
    ("variables", "island_size", "said"),
    [
        (TORCHRUN, 3, "island.size.* is 3: it does not divide the 8 ranks"),
        ({"SLURM_PROCID": "1"}, 1, "srun started several tasks, and none knows of the others"),
        ({}, 2, "island.size.* is 2: no launcher has started this process"),
        ({WORKER: "2", WORKERS: "3", RANKS: "2,1,3", "RANK": "1"}, 2, "is to have 2 ranks .* has started 3: give"),
        (TORCHRUN | {SLOWDOWN: "1,2"}, 1, "SLOWDOWN"),
    ],
)
def test_ranks_that_make_no_workers_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    bound: list[tuple[int, int]],
    variables: dict[str, str],
    island_size: int,
    said: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said) as caught:
        WorkerContext.find(island_size)
    assert "\n" not in str(caught.value) and not bound
