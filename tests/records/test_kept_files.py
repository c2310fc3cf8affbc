"""What files of a run hold, who may read them, and who is told where one could not be written."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import ConfigurationError, RefusedError
from fairseq_async.records.description import RunDescription
from fairseq_async.records.event_log import EventLog, _covered
from fairseq_async.records.events import Event
from fairseq_async.records.recording import read_vector, record_vector
from fairseq_async.records.snapshots import Snapshots
from fairseq_async.records.state_files import moved, placed, read_state, write_state


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_writer_that_is_killed_is_told_of_and_one_that_has_ended_is_noted(tmp_path: Path) -> None:
    told, noted = list[str](), list[Any]()
    snapshots = Snapshots(tmp_path, tell=told.append)
    snapshots.journal = lambda *given: noted.append(given)  # type: ignore[assignment]
    snapshots._write = lambda state, version: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    snapshots.take({}, 6), snapshots.wait()
    assert told == ["a snapshot could not be written; the run goes on without it"] and not noted
    snapshots._write = lambda state, version: None  # type: ignore[method-assign]
    snapshots.take({}, 7), snapshots.wait()
    assert noted == [("snapshot", "the snapshot of version 7 is written")]


def test_the_last_snapshot_is_written_after_the_one_that_is_being_written(tmp_path: Path) -> None:
    """That one would remove it, as one of a lower version that comes later."""
    snapshots, did = Snapshots(tmp_path), list[str]()
    snapshots.wait = lambda: did.append("waits")  # type: ignore[method-assign]
    snapshots._write = lambda state, version: did.append("writes")  # type: ignore[method-assign]
    snapshots.take_last({}, 7)
    assert did == ["waits", "writes"]


@pytest.mark.parametrize("resumes", [False, True])
def test_snapshots_of_another_run_stay_where_this_run_is_to_go_on_from_them(tmp_path: Path, resumes: bool) -> None:
    Snapshots(tmp_path, run="theirs").take_here({}, 1)
    assert Snapshots(tmp_path, run="ours").latest(lambda state: None, resumes) is None
    (path,) = (tmp_path / "snapshots").iterdir()
    assert path.suffix == (".pt" if resumes else ".other")


def test_each_kind_of_what_is_not_recorded_is_told_of_by_itself(tmp_path: Path) -> None:
    told = list[str]()
    log = EventLog(tmp_path, {}, "the beginning", 0.0, told.append)
    for what, fails in (("one", True), ("two", True), ("one", True), ("two", False), ("one", True), ("two", True)):
        with log._or_without(what):
            if fails:
                raise OSError
    assert [line.split()[0] for line in told] == ["one", "two", "two"]


def test_the_first_update_of_a_worker_that_a_state_does_not_know_came_after_it() -> None:
    assert _covered(b'{"sequence": 0, "worker": 3}\n', {2: 5}) is False


def test_an_event_of_the_first_edition_has_its_names_of_then() -> None:
    line = {"time": 1, "worker": 0, "sequence": 0, "base_version": 0, "staleness": 0, "weight": 1, "version_after": 1}
    then = line | {"status": "applied", "pace": 0.5, "told": [{"event": "limit_round", "updates": 2}]}
    event = Event.from_json(json.dumps(then).encode())
    assert event.progress_per_step == 0.5 and [each.updates for each in event.control_events] == [2]


def test_a_state_lies_where_the_server_looks_for_it_for_as_long_as_it_looks(tmp_path: Path) -> None:
    """A worker that was killed may have left one there."""
    state, inbox = tmp_path / "state.pt", tmp_path / "inbox.pt"
    write_state(state, {"version": 1})
    write_state(state, {"version": 2})
    inbox.write_bytes(b"left")
    with placed(state, inbox):
        assert read_state(inbox) == {"version": 2} and mode(state) == mode(inbox) == 0o600
    assert not inbox.exists()
    inbox.symlink_to(state)
    with pytest.raises(RefusedError, match="the server's state cannot be read"):
        read_state(inbox)


def test_the_tensors_of_a_state_are_moved_wherever_they_are_in_it() -> None:
    one = torch.ones(1)
    found = moved({"a": [one], "b": (one, 3), "c": one}, torch.device("meta"))
    assert found["b"][1] == 3 and all(each.is_meta for each in (found["a"][0], found["b"][0], found["c"]))


def test_a_recorded_vector_is_that_part_of_its_storage_alone_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vectors" / "one.pt"
    record_vector(path, torch.ones(1 << 16)[:3])
    assert path.stat().st_size < 1 << 14 and mode(path) == 0o600 and read_vector(path, 3).tolist() == [1.0] * 3
    for other, size in ((torch.ones(3), 2), (torch.ones(3), 4), (torch.ones(3).double(), 3), (torch.ones(1, 3), 3)):
        record_vector(path, other)
        with pytest.raises(ConfigurationError, match=f"not {size} values in fp32"):
            read_vector(path, size)


PLAIN = {"has_barrier": False, "closes_early": False, "exchanges_while_computing": False, "fragments": 1, "shards": 1}
PLAIN |= {"has_regions": False, "unit": ""}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"method": {}}, {}),
        ({"method": {"barrier": 3}}, {"has_barrier": True}),
        ({"method": {"barrier": 3, "closes_early": True}}, {"closes_early": True}),
        ({"method": {"options": {"overlap": True}}}, {"exchanges_while_computing": True}),
        ({"method": {"options": {"fragment_delay": 1}}}, {"exchanges_while_computing": True}),
        ({"method": {"options": {"fragments": 2}}}, {"exchanges_while_computing": True, "fragments": 2}),
        ({"method": {"server": {"server_shards": 2, "shard_hosts": "a:1,b:2"}}}, {"shards": 4}),
        ({"method": {"server": {"server_shards": 0}}}, {}),
        ({"method": {"method": "local_sgd"}}, {"unit": "local steps"}),
        ({"method": {"method": "local_sgd", "framework": {"inner_optimizer": {}}}}, {"unit": "tokens"}),
        ({"method": {"framework": {"regions": 2}}}, {}),
        ({"method": {"framework": {"regions": 2}}, "simulated": {}}, {"has_regions": True, "unit": "tokens"}),
    ],
    ids=str,
)
def test_a_description_says_how_a_run_exchanges(
    tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(content))
    found = RunDescription.read(tmp_path)
    assert {name: getattr(found, name) for name in PLAIN} == PLAIN | expected
