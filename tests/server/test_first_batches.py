"""Two workers that begin with the same batch are noticed, once."""

from pathlib import Path

import pytest

from fairseq_async.errors import RefusedError
from fairseq_async.server.first_batches import FirstBatches
from scripts.faults.thread_server import ThreadServer
from tests.helpers.run_files import events
from tests.helpers.server_client import join, push


def test_only_two_different_workers_with_the_same_batch_are_named_and_only_once() -> None:
    said: list[str] = []
    batches = FirstBatches(said.append, 4)
    for worker, digest in [
        (3, "x"),
        (0, "a"),
        (2, "b"),
        (0, "a"),
        (3, "y"),
        (4, "b"),
    ]:  # 0 was started again, 4 has joined
        batches.note(worker, digest)
    assert said == []
    for worker, digest in [(1, "b"), (3, "a")]:
        batches.note(worker, digest)
    assert len(said) == 1 and "workers 1 and 2 began with the same batches" in said[0]
    earlier = FirstBatches(said.append, 4)
    for worker, digest in [(0, "a"), *[(0, "of its later starts")] * 9, (1, "a")]:
        earlier.note(worker, digest)
    assert len(said) == 2


def test_where_the_script_divides_the_data_the_same_batch_is_an_error() -> None:
    batches = FirstBatches(pytest.fail, 4)
    batches.must_differ = True
    batches.note(0, "a")
    batches.note(0, "a")
    with pytest.raises(RefusedError, match=r"workers 0 and 1 began with the same batches.*callback\.workers"):
        batches.note(1, "a")


def test_a_worker_with_ever_new_batches_takes_no_memory_and_no_other_workers_place() -> None:
    said: list[str] = []
    batches = FirstBatches(said.append, 4)
    batches.note(0, "a")
    for number in range(1000):
        batches.note(1, str(number))
    assert sum(map(len, batches._digests.values())) < 10
    batches.note(2, "a")
    assert len(said) == 1 and "workers 0 and 2 began with the same batches" in said[0]


def test_the_digest_comes_with_an_update_and_is_in_the_log(tmp_path: Path) -> None:
    with ThreadServer(1, tmp_path) as server:
        push(join(server, 0), 0, 0.5, first_batch="00ff")
    assert events(tmp_path)[0]["first_batch"] == "00ff"
