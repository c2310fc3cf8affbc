"""What the launcher shows of a run's progress on a terminal."""

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fairseq_async.launch.progress.display import Display
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.method.spec import MethodSpec
from tests.helpers.stand_ins import NoRoom


def event(worker: int, version: int, now: float, **more: Any) -> str:
    fields = {"time": now, "worker": worker, "version_after": version, "status": "applied", "weight": 100.0}
    return json.dumps(fields | {"sequence": 0, "base_version": 0, "staleness": 1, "loss": 2.0} | more) + "\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EPIPE], ids=["full", "closed terminal", "closed pipe"])
def test_a_line_that_cannot_be_written_is_lost_and_ends_nothing(tmp_path: Path, code: int) -> None:
    display = Display(Progress(tmp_path, 1))
    display.console = Console(file=NoRoom(code))
    display.say("update 1")
    assert not display.console._buffer
    assert display.closed == (code == errno.EPIPE), "a view that nobody reads may end; a run goes on"
    with Display(Progress(tmp_path, 1), Console(file=NoRoom(code), force_terminal=True)) as shown:
        shown.refresh()
    assert shown.closed == display.closed


def test_where_there_is_no_terminal_a_line_comes_every_ten_seconds(tmp_path: Path) -> None:
    now = [1000.0]
    with (tmp_path / "out").open("w") as file:
        display = Display(Progress(tmp_path, 1, clock=lambda: now[0]), Console(file=file))
        for _ in range(35):
            now[0] += 1.0
            display.refresh()
    assert len((tmp_path / "out").read_text().splitlines()) == 3


def test_a_letter_that_the_terminal_does_not_have_is_an_escape(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        display = Display(Progress(tmp_path, 1), Console(file=file))
        display.say("the run in Zürich")
    assert (tmp_path / "out").read_text() == "the run in Z\\xfcrich\n"


@pytest.mark.parametrize("width", [1, 80])
def test_text_of_others_is_shown_as_it_is(tmp_path: Path, width: int) -> None:
    """A refused introduction gets into the server's log before anybody has proved a token."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("")
    progress = Progress(tmp_path, 1)
    text = "refused: [/x] [bold] :smile: \\[red]"
    (tmp_path / "logs" / "server.log").write_text(f"2026-01-01 00:00:00 | {text}\n")
    console = Console(force_terminal=True, width=width, record=True, file=(tmp_path / "out").open("w"))
    with Display(progress, console) as display:
        display.refresh()
        display.say(text)
    assert "".join(text.split()) in "".join(console.export_text().split()) and display._mistake == ""


_BIG = st.floats(0, allow_infinity=False)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(reports=[{"epochs": 0.0}, {"epochs": 1e-300}, {"epochs": 1e-300}])
@example(reports=[{"epochs": 1e308}, {"epochs": 1e308}, {"look_ahead": 1e308}, {"look_ahead": 1e308}])
@given(
    reports=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "epochs": _BIG,
                "look_ahead": _BIG,
                "loss": st.floats(allow_nan=False, allow_infinity=False),
                "tokens": st.floats(0, 2**53),
                "local_steps": st.integers(0, 2**53),
                "bytes_sent": st.integers(0, 2**53),
                "residual_norm": _BIG,
                "payload": st.just("00c0ffee"),
            },
        ),
        min_size=2,
        max_size=4,
    )
)
def test_every_report_that_a_worker_may_send_has_a_text(tmp_path: Path, reports: list[dict[str, Any]]) -> None:
    now = [1000.0]
    (tmp_path / "events.jsonl").write_text("")
    description = {"method": asdict(MethodSpec("hybrid_async", 2, max_epoch=10)), "layout": [], "workers": 2}
    (tmp_path / "run.json").write_text(json.dumps(description))
    progress = Progress(tmp_path, 2, clock=lambda: now[0])
    with Display(progress, Console(force_terminal=True, file=(tmp_path / "out").open("w"))) as display:
        for number, report in enumerate(reports):
            now[0] += 2.0
            with (tmp_path / "events.jsonl").open("a") as file:
                file.write(event(0, 1 + number, now[0], sequence=number, **report))
            display.refresh()
    assert display._mistake == "" and progress.result() and progress.updates[0] == len(reports)


def test_events_that_cannot_be_read_for_a_while_end_nothing_and_are_read_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    progress = Progress(tmp_path, 1)
    path.write_text(event(0, 1, 1000.0))
    progress.poll()
    path.rename(tmp_path / "kept")
    path.mkdir()  # for root, too, it cannot be read
    display = Display(progress, Console(file=(tmp_path / "out").open("w")))
    display.refresh()
    assert progress.updates == {0: 1} and "events.jsonl cannot be read: Is a directory" in progress.status
    path.rmdir()
    (tmp_path / "kept").rename(path)
    with path.open("a") as file:
        file.write(event(0, 2, 1001.0, sequence=1))
    display.refresh()
    assert progress.updates == {0: 2} and "cannot be read" not in progress.status


def test_a_run_whose_events_cannot_be_read_may_have_begun(tmp_path: Path) -> None:
    """The files of a run that never began are removed when it is interrupted."""
    progress = Progress(tmp_path, 1)
    assert not progress.begun
    (tmp_path / "events.jsonl").mkdir()
    progress.poll()
    assert progress.begun


def test_a_mistake_of_the_display_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(progress: Progress) -> str:
        raise ValueError("no text for this")

    monkeypatch.setattr(Progress, "status", property(broken))
    console = Console(force_terminal=True, width=200, record=True, file=(tmp_path / "out").open("w"))
    with Display(Progress(tmp_path, 1), console) as display:
        display.refresh()
        display.refresh()
    assert console.export_text().count("the progress cannot be shown: ValueError('no text for this')") == 1
