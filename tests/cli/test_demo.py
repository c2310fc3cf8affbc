"""``fairseq-async demo``: two trainings by the launcher, with few steps."""

import sys
from pathlib import Path

import pytest

from fairseq_async.cli.demo import _draw, _run, demo
from fairseq_async.errors import AsyncError, ConfigurationError
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


@pytest.mark.usefixtures("executed")
def test_an_interrupted_demo_ends_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(
        "#!/bin/bash\ntrap 'echo ended; exit' TERM\necho started\nfor n in {1..600}; do sleep 0.1; done\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    log, run = tmp_path / "run.log", _run("synchronous", tmp_path / "run", steps=6)
    while "started" not in log.read_text() if log.exists() else True:
        next(run)
    run.close()  # as an interrupt does where the picture is drawn
    assert "ended" in log.read_text()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AsyncError, match=r"--out: .*none/demo.png cannot be written: No such file"):
        _draw({"synchronous": [(0.0, 2.0), (1.0, 1.0)]}, tmp_path / "none" / "demo.png")
