"""``fairseq-async demo``: two trainings by the launcher, with few steps."""

import sys
from pathlib import Path

import pytest

from fairseq_async.cli.demo import demo
from fairseq_async.errors import ConfigurationError
from fairseq_async.records.events import read_events
from tests.helpers.commands import ROOT
from tests.helpers.forking import COMMON, stand_ins, start


def test_both_runs_train_on_as_many_batches_and_the_curves_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = stand_ins(start(COMMON, {"PYTHONPATH": str(ROOT)}))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    demo(tmp_path / "demo", steps=30)  # long enough for the second worker, which may start seconds later beside load
    output = capsys.readouterr().out
    for name in ("synchronous", "asynchronous"):
        events = read_events(tmp_path / "demo" / name / "events.jsonl")
        assert 59 <= len(events) <= 63 and {event.worker for event in events} == {0, 1}
        assert name == "asynchronous" or {event.staleness for event in events} == {0}
    assert "loss  +" in output and "the synchronous run's last loss" in output
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"--out .*file: cannot be written: Not a directory"):
        demo(tmp_path / "file", steps=6)
