"""``fairseq-async demo``: two trainings by the launcher, with few steps."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_async.cli.demo import _draw, _picture, _reached, _read, _run, demo
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
        assert len({event.loss for event in events if event.sequence == 0}) == 2, "each worker has a text of its own"
    assert "loss  +" in output and "the synchronous run's last loss" in output
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_ends_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairseq_async.cli.demo.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        demo(tmp_path / "demo", steps=6)
    assert not (tmp_path / "demo").exists()


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"--out .*file: cannot be written: Not a directory"):
        demo(tmp_path / "file", steps=6)


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'fairseq-async: error: worker 0 ended' >&2; exit 2", "the synchronous run has failed: worker 0 ended; "),
        ("exit 0", "the synchronous run has left no losses in .*run: make room there, or give another --out"),
    ],
)
def test_a_run_that_fails_or_cannot_write_is_one_line_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(f"#!/bin/bash\n{script}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    with pytest.raises(AsyncError, match=said):
        list(_run("synchronous", tmp_path / "run", steps=6))


@pytest.mark.usefixtures("executed")
def test_an_interrupted_demo_stays_until_its_launcher_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(
        "#!/bin/bash\ntrap 'sleep 1; echo ended; exit' TERM\necho started\nfor n in {1..600}; do sleep 0.1; done\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    log, run = tmp_path / "run.log", _run("synchronous", tmp_path / "run", steps=6)
    while "started" not in log.read_text() if log.exists() else True:
        next(run)
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt)
    assert "ended" in log.read_text()


def test_the_curves_are_means_over_fifteen_updates_from_the_first_with_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [None, *(float(number) for number in range(1, 21))]
    events = [SimpleNamespace(time=100.0 + 2 * number, loss=loss) for number, loss in enumerate(losses)]
    monkeypatch.setattr("fairseq_async.records.events.read_events", lambda path: events)
    curve = _read(tmp_path)
    assert [seconds for seconds, _ in curve] == [2.0 * number for number in range(20)]
    assert [mean for _, mean in curve] == [(1 + n) / 2 for n in range(1, 16)] + [9.0, 10.0, 11.0, 12.0, 13.0]
    assert (_reached(curve, 8.0), _reached(curve, 1.4), _reached(curve, 0.9)) == ("0 s", "0 s", "none of it")
    assert _reached([(0.0, 3.0), (4.4, 2.0), (9.0, 1.0)], 2.0) == "4 s"


def test_the_picture_has_each_point_at_its_time_and_loss() -> None:
    assert _picture({"synchronous": []}).startswith("starting two workers")
    lines = _picture(
        {"synchronous": [(0.0, 3.0), (20.0, 1.0)], "asynchronous": [(0.0, 3.0), (10.0, 2.0), (15.0, 1.0)]}
    ).splitlines()
    found = {
        (row, column - 7): mark
        for row, line in enumerate(lines[:14])
        for column, mark in enumerate(line)
        if mark in "sa"
    }
    assert found == {(0, 0): "a", (13, 71): "s", (6, 36): "a", (13, 53): "a"}
    assert (lines[0][:7], lines[13][:7], lines[7][:7]) == (" 3.00 |", " 1.00 |", "      |") and lines[-1].endswith(
        "  20 s"
    )


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AsyncError, match=r"--out: .*none/demo.png cannot be written: No such file"):
        _draw({"synchronous": [(0.0, 2.0), (1.0, 1.0)]}, tmp_path / "none" / "demo.png")


def test_on_a_full_disk_the_line_says_where_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(AsyncError, match=f"the disk is full; make room in {tmp_path}$"):
        _draw({"synchronous": [(0.0, 2.0), (1.0, 1.0)]}, tmp_path / "demo.png")


def test_the_picture_fits_into_a_small_terminal() -> None:
    curves = {"synchronous": [(0.0, 5.5), (43.0, 2.7)], "asynchronous": [(0.0, 5.5), (18.0, 2.6)]}
    for columns, lines, height in ((200, 50, 16), (50, 10, 8)):
        picture = _picture(curves, columns, lines).splitlines()
        assert len(picture) == height <= lines and max(map(len, picture)) <= min(columns, 80)
        assert picture[0].startswith(" 5.50 |a") and picture[-3].startswith(" 2.60 |") and "s" in picture[-3][-3:]
