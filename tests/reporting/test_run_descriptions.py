"""A run's directory whose ``run.json`` is cut or another program's is one line in every command that reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.progress.run_length import RunLength
from fairseq_async.replay.replay import Recording
from fairseq_async.reporting.capacity import measure
from fairseq_async.reporting.runs import load
from fairseq_async.reporting.watch import WatchedRun

EVENT = (
    b'{"time": 1, "worker": 0, "sequence": 0, "base_version": 0, "staleness": 0, "weight": 1, "version_after": 1, '
    b'"status": "applied", "server_seconds": 0.0, "checksum": "0"}\n'
)
READERS: list[Callable[[Path], object]] = [lambda run: load([run]), measure, WatchedRun, Recording.read, RunLength.read]
NO_DESCRIPTIONS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"workers": 2}',
    b'{"workers": "two", "method": {}, "layout": []}',
    b'{"workers": 2, "method": null, "layout": []}',
]


def directory(run_dir: Path, description: bytes, events: bytes) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.json").write_bytes(description)
    (run_dir / "events.jsonl").write_bytes(events)
    return run_dir


@pytest.mark.parametrize("description", NO_DESCRIPTIONS)
def test_what_is_no_description_of_a_run_is_one_line(tmp_path: Path, description: bytes) -> None:
    run = directory(tmp_path / "run", description, EVENT)
    for read in READERS:
        with pytest.raises(
            ConfigurationError, match=r"run: no run that can be read there \(run.json\): .*; give the"
        ) as error:
            read(run)
        assert "\n" not in str(error.value)


def test_a_method_or_a_model_that_is_none_is_one_line_where_it_is_asked_for(tmp_path: Path) -> None:
    run = directory(tmp_path / "run", b'{"workers": 2, "method": {"lateness": 3}, "layout": [["w", "x"]]}', EVENT * 20)
    for read in (RunLength.read, Recording.read, measure):
        with pytest.raises(ConfigurationError, match="no run that can be read there"):
            read(run)


def test_events_that_are_no_file_are_one_line(tmp_path: Path) -> None:
    run = directory(tmp_path / "run", b'{"workers": 1, "method": {"barrier": 0}}', b"")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    with pytest.raises(ConfigurationError, match="events.jsonl cannot be read: Is a directory"):
        load([run])


def test_a_server_that_took_no_measurable_time_has_no_end_of_capacity(tmp_path: Path) -> None:
    """Clocks are coarse: neither a time of 0 nor two events at one time divides anything."""
    run = directory(
        tmp_path / "run", b'{"workers": 1, "method": {"barrier": 0}, "layout": [["w", [3], "f"]]}', EVENT * 20
    )
    measured = measure(run)
    assert measured.costs.workers_held >= 1 and measured.updates_per_second > 0
