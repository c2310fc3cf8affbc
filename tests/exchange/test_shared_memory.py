"""Memory that a server shares with its workers."""

import contextlib
import errno
import gc
import mmap
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange import SharedMemory, linux, shared_memory
from tests.helpers.stand_ins import Time

SIZE = 200_000


def test_a_pull_never_mixes_two_versions() -> None:
    memory, stop = SharedMemory.create(SIZE, 1), threading.Event()
    memory.publish(torch.zeros(SIZE), 0)
    server = SharedMemory.attach(memory.path, SIZE, 1)

    def publish_until_told() -> None:
        """A server computes between two publications, now longer and now shorter than a reader copies."""
        version = 0
        while not stop.is_set():
            version += 1
            server.publish(torch.full((SIZE,), float(version)), version)
            time.sleep(0.0005 * (version % 16))

    writer = threading.Thread(target=publish_until_told)
    writer.start()
    try:
        mine, versions = torch.empty(SIZE), [0]
        while len(set(versions)) < 50:
            versions.append(memory.read(mine.copy_))
            assert mine.min().item() == mine.max().item() == versions[-1]
    finally:
        stop.set()
        writer.join()
    assert versions == sorted(versions)


def test_a_reader_copies_again_what_was_published_while_it_copied() -> None:
    memory, mine, versions = SharedMemory.create(5, 1), torch.empty(5), iter((2, 3))
    memory.publish(torch.ones(5), 1)

    def disturbed(published: torch.Tensor) -> None:
        mine.copy_(published)
        if (version := next(versions, None)) is not None:
            memory.publish(torch.full((5,), float(version)), version)

    assert memory.read(disturbed) == 3 and mine.tolist() == [3.0] * 5


def test_slots_and_parameters_do_not_overlap() -> None:
    memory = SharedMemory.create(5, 3)
    other = SharedMemory.attach(memory.path, 5, 3)
    memory.publish(torch.full((5,), 9.0), 4)
    for worker in range(3):
        other.slot(worker).fill_(worker)
    assert [memory.slot(w).tolist() for w in range(3)] == [[float(w)] * 5 for w in range(3)]
    seen = torch.empty(5)
    assert other.read(seen.copy_) == 4 and seen.tolist() == [9.0] * 5


def test_the_version_is_written_before_readers_may_take_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, seen = SharedMemory.create(5, 3), list[tuple[int, int]]()
    advance = SharedMemory._advance_counter

    def noted(of: SharedMemory) -> None:
        seen.append((int(of._header[0]), int(of._header[1])))
        advance(of)

    monkeypatch.setattr(SharedMemory, "_advance_counter", noted)
    memory.publish(torch.ones(5), 7)
    assert seen == [(0, 0), (1, 7)], "an even counter says that version and parameters belong together"


def test_it_has_no_name_that_could_clash_or_be_left_behind() -> None:
    memory = SharedMemory.create(1000, 2)
    path = memory.path.partition(":")[0]
    assert os.readlink(path).startswith("/dev/shm/") and os.stat(path).st_nlink == 0
    memory.close()


def test_the_memory_of_another_run_at_the_same_path_is_not_taken_for_the_servers() -> None:
    """Two containers that share 127.0.0.1 have processes of the same number with the same descriptors."""
    here, there = SharedMemory.create(5, 3), SharedMemory.create(5, 3)
    (path, _), (_, name) = here.path.split(":"), there.path.split(":")
    with pytest.raises(ConfigurationError, match="is not the memory of this run's server"):
        SharedMemory.attach(f"{path}:{name}", 5, 3)
    inode = here.path.rpartition("-")[0]
    with pytest.raises(ConfigurationError, match="is not the memory of this run's server"):
        SharedMemory.attach(f"{inode}-{1:x}", 5, 3)  # a file on another machine's disk may have the same numbers
    attached = SharedMemory.attach(here.path, 5, 3)
    attached.slot(2).fill_(4.0)
    assert here.slot(2).tolist() == [4.0] * 5


@pytest.mark.parametrize("publishes", [False, True])
def test_a_slot_has_its_memory_before_it_is_written_to(publishes: bool) -> None:
    """Else a write to it could fail, by a signal that ends the worker."""
    pages = 3
    memory = SharedMemory.create(pages * mmap.PAGESIZE // 4, 3, publishes)
    held = [os.fstat(memory._descriptor).st_blocks * 512 // mmap.PAGESIZE]
    for worker in (2, 0, 0):
        memory.allocate_slot(worker)
        memory.slot(worker).fill_(1.0)
        held.append(os.fstat(memory._descriptor).st_blocks * 512 // mmap.PAGESIZE)
    shared = 1 + pages * publishes
    assert held == [shared, shared + pages, shared + 2 * pages, shared + 2 * pages]


def test_no_room_is_one_clear_line() -> None:
    with pytest.raises(ExchangeError, match=r"no room in /dev/shm.*--shm-size") as caught:
        SharedMemory.create(2**44, 1)
    assert "\n" not in str(caught.value)


def open_memory() -> list[str]:
    """The shared memory that this process has open; threads of other tests open and close files of other kinds."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was that of the listing, or of another thread
            found.append(str(descriptor.readlink()))
    return sorted(target for target in found if target.startswith(("/dev/shm", "/memfd")))


def test_memory_that_is_refused_or_closed_leaves_no_file_open(tmp_path: Path) -> None:
    memory = SharedMemory.create(5, 3)
    gc.collect()
    before = open_memory()
    kept = SharedMemory.attach(memory.path, 5, 3)
    assert len(open_memory()) > len(before)
    kept.close()
    del kept
    for other in (4, 6):
        with pytest.raises(ExchangeError, match="size"):
            SharedMemory.attach(memory.path, other, 3)
    with pytest.raises(ExchangeError, match="cannot be opened"):
        SharedMemory.attach(str(tmp_path / "missing"), 5, 3)
    with pytest.raises(ConfigurationError, match="another container"):
        SharedMemory.attach(memory.path + "1", 5, 3)
    with pytest.raises(ExchangeError, match="no room"):
        SharedMemory.create(2**44, 1)
    SharedMemory.attach(memory.path, 5, 3).close()
    other = SharedMemory.create(5, 3)
    assert other.inode != memory.inode
    other.close()
    del other
    gc.collect()  # a mapping has a descriptor of its own
    assert open_memory() == before


def test_a_reader_waits_through_many_publications(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory.create(5, 1)
    memory._advance_counter()
    clock = SimpleNamespace(now=0.0, publications=0, monotonic=lambda: clock.now)

    def sleep(seconds: float) -> None:
        clock.now += 0.4 * shared_memory._PATIENCE
        clock.publications += 1
        if clock.publications % 2 == 0 and clock.publications < 10:
            memory._advance_counter()  # ends one publication ...
        if clock.publications % 2 == 0:
            memory._advance_counter()  # ... and begins the next

    clock.sleep = sleep
    monkeypatch.setattr(shared_memory, "time", clock)
    memory.read(torch.empty(5).copy_)  # the wait is longer than the patience with any one of them
    assert clock.now > 2 * shared_memory._PATIENCE


def test_a_server_that_died_while_it_published_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairseq_async.exchange.shared_memory._PATIENCE", 0.1)
    memory = SharedMemory.create(5, 1)
    memory._advance_counter()  # begun, never ended
    with pytest.raises(ExchangeError, match="stopped while it published"):
        memory.read(torch.empty(5).copy_)


@pytest.mark.parametrize(("dies_at", "noticed_at"), [(1e9, 10.0), (3.0, 3.0)], ids=["stuck", "dead"])
def test_a_reader_waits_ten_seconds_for_the_end_of_a_publication_unless_the_server_is_gone(
    monkeypatch: pytest.MonkeyPatch, dies_at: float, noticed_at: float
) -> None:
    memory, clock = SharedMemory.create(5, 1), Time(0.0)
    memory._advance_counter()  # begun, never ended
    monkeypatch.setattr(shared_memory, "time", clock)
    with pytest.raises(ExchangeError, match="stopped while it published"):
        memory.read(torch.empty(5).copy_, lambda: clock.now >= dies_at)
    assert clock.now == pytest.approx(noticed_at, abs=0.01)


def test_what_is_free_of_shared_memory_is_what_a_user_who_is_not_root_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(f_blocks=4096, f_bfree=2048, f_bavail=1024, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    said = shared_memory._no_room(3 << 20, OSError(errno.ENOSPC, "no space"))
    assert "parameters and slots need 3 MiB, 4 MiB are free;" in said
    assert "cannot be used for shared memory: denied" in shared_memory._no_room(3, OSError(errno.EACCES, "denied"))


def test_of_memory_that_is_given_back_the_whole_pages_within_are_lost_and_nothing_beside_them() -> None:
    with mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        held = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        linux.give_back(held.data_ptr() + 8, 3 * mmap.PAGESIZE)
        assert [int(page.sum()) for page in held.split(mmap.PAGESIZE)] == [mmap.PAGESIZE, 0, 0, mmap.PAGESIZE]
        del held
