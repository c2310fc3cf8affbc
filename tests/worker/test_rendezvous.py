"""How the ranks of a job find each other through the launcher's store."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.start import store, world
from fairseq_async.worker.start.context import WorkerContext


@pytest.fixture
def other_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """The store of another job at this job's MASTER_PORT."""
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setattr(store, "_kept", [])
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": hosted.port}.items():
        monkeypatch.setenv(name, str(value))
    yield hosted


def test_the_first_rank_finds_its_port_taken(other_job: TCPStore) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"port {other_job.port} \(MASTER_PORT\) is another job's: .*master_port"
    ):
        store.open_store(0)


def test_another_rank_finds_its_place_taken(other_job: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would join the other job's run."""
    store.open_store(1)
    monkeypatch.setattr(store, "_kept", [])  # as in the other job's process
    with pytest.raises(ConfigurationError, match="is another job's"):
        store.open_store(1)


def test_ranks_that_torchrun_has_started_again_find_nothing_that_those_before_have_told(
    other_job: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a server that is gone, for one; and their own places are free."""
    store.tell(1, "server", "127.0.0.1:1")
    monkeypatch.setattr(store, "_kept", [])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    store.tell(1, "server", "127.0.0.1:2")
    assert store.ask(1, "server", "") == "127.0.0.1:2" and store.open_store(1).num_keys() >= 4


def test_the_number_of_ranks_of_this_machine_is_what_deepspeed_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may have set LOCAL_WORLD_SIZE, torchrun's variable, to 1."""
    for name in [name for name in os.environ if name.startswith("FAIRSEQ_ASYNC_")]:
        monkeypatch.delenv(name)
    launched = {"RANK": 1, "WORLD_SIZE": 4, "MASTER_ADDR": "h", "MASTER_PORT": 1, "LOCAL_SIZE": 4}
    for name, value in (launched | {"LOCAL_WORLD_SIZE": 1}).items():
        monkeypatch.setenv(name, str(value))
    found = WorkerContext.find()
    assert (found.global_rank, found.workers, found.several_machines, found.has_store) == (1, 4, False, True)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    found = WorkerContext.find(island_size=2)
    assert (found.worker, found.rank, found.local_rank, found.several_machines) == (1, 1, 0, True)


@pytest.mark.parametrize("given", ["", "3"])
def test_a_worker_without_a_launcher_of_ranks_is_a_world_of_its_own(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """On the GPU that its launcher has given it."""
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": given} if given else {})
    monkeypatch.setattr(world, "free_port", lambda: 29400)
    world.start_world(WorkerContext(worker=2, workers=5))
    assert os.environ == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": given or "0",
        "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_an_island_without_a_launcher_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("FAIRSEQ_ASYNC_", "RANK"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match="island.size.* is 2: no launcher has started this process"):
        WorkerContext.find(island_size=2)
