"""``fairseq-async audit``: logs that prove a run, and logs that do not."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairseq_async import cli
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Report
from fairseq_async.protocol.receipt import Receipt, Status
from fairseq_async.records import event_log as events
from fairseq_async.records.event_log import EVENTS, EventLog
from fairseq_async.records.events import Rollback
from fairseq_async.reporting.audit import Audit, AuditError, audit, show
from scripts.faults.thread_server import ThreadServer
from tests.helpers.server_client import join_patiently, push


def event(
    worker: int, sequence: int, base: int, after: int, status: str = "applied", staleness: int = 0
) -> dict[str, Any]:
    fields = {"time": 1.0, "worker": worker, "sequence": sequence, "base_version": base, "version_after": after}
    return fields | {"staleness": staleness, "weight": 1.0, "status": status}


def write(run_dir: Path, lines: list[dict[str, Any]], name: str = events.EVENTS) -> None:
    (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollback(sequences: dict[int, int], taken_back: int, source: str = "snapshot version-2.pt") -> dict[str, Any]:
    return {"time": 1.0, "source": source, "sequences": sequences, "events": taken_back}


RUN = [
    event(0, 0, 0, 1),
    event(1, 0, 0, 2, staleness=1),
    event(1, 1, 2, 2, "refused"),
    event(0, 1, 1, 2, "stale", staleness=1),
    event(0, 1, 1, 2, "duplicate", staleness=1),
    event(0, 2, 2, 3),
    event(1, 2, 2, 3, "outlier", staleness=1),
    event(1, 3, 3, 3, "finished"),
]


def test_a_run_without_faults_is_counted(tmp_path: Path) -> None:
    write(tmp_path, RUN)
    found = audit(tmp_path)
    assert found.applied == 3 and found.version == 3 and not found.covered and not found.cut
    assert {worker: dict(counts) for worker, counts in found.counts.items()} == {
        0: {Status.APPLIED: 2, Status.STALE: 1, Status.DUPLICATE: 1},
        1: {Status.APPLIED: 1, Status.REFUSED: 1, Status.OUTLIER: 1, Status.FINISHED: 1},
    }


def change(line: int, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda lines: lines[line].update(values)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: lines.pop(2), r"line 6: worker 1's update 2 comes after its update 0: update 1 was .* lost"),
        (lambda lines: lines.insert(6, event(0, 1, 2, 3)), r"line 7: worker 0's update 1 comes .* it counts twice"),
        (change(5, version_after=4), r"line 6: worker 0's update 2 \(applied\) took .* version 2 to 4"),
        (change(2, version_after=3), r"line 3: worker 1's update 1 \(refused\) took .* version 2 to 3"),
        (change(5, version_after=1), "version 2 to 1"),
        (change(0, merged=[1], base_version=1, version_after=3), r"line 1: .* took the server from version 1 to 3"),
        (change(5, base_version=3), "line 6: worker 0's update 2 started from version 3"),
        (change(5, base_version=3, staleness=-1), "line 6: worker 0's update 2 started from version 3, -1 before 2"),
        (change(6, staleness=2), "line 7: worker 1's update 2 started from version 2, 2 before 3"),
        (change(4, sequence=2), "line 5: worker 0's update 2 was called a duplicate, but was never settled"),
    ],
)
def test_the_first_violation_is_named(
    tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    lines = [dict(line) for line in RUN]
    spoil(lines)
    write(tmp_path, lines)
    with pytest.raises(AuditError, match=message):
        audit(tmp_path)


def test_all_that_a_log_says_is_found_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on from another directory, and has a merge, lines that are none, rollbacks, and cut files."""
    lines = [
        event(2, 70, 48, 51, staleness=2),
        event(0, 8, 49, 53, staleness=3) | {"merged": [52]},
        {"no": "event"},
        event(2, 72, 53, 55, staleness=1),
        {"no": "event"},
        event(0, 10, 55, 57, staleness=1),
        event(0, 12, 57, 58),
    ]
    write(tmp_path, lines)
    write(tmp_path, [{"no": "event"}] * 2, events.BAD)
    write(tmp_path, [event(0, 11, 57, 58), event(1, 5, 57, 59, staleness=1)], events.ROLLED_BACK)
    first = rollback({0: 10, 2: 72}, 2)
    write(tmp_path, [first, {"no": "rollback"}], events.ROLLBACKS)
    cut = [events.ROLLBACKS, events.ROLLED_BACK, events.EVENTS]
    for name in cut:
        with (tmp_path / name).open("a") as file:
            file.write('{"worker": 0')
    found = audit(tmp_path)
    source = "a state that line 2 of rollbacks.jsonl does not say"
    second = {"time": 0.0, "source": source, "sequences": {}, "events": 0}
    rollbacks = [Rollback.model_validate(each) for each in (first, second)]
    bad = [line.partition(": ")[0] for line in found.bad]
    assert bad == [f"{tmp_path / name}, line {at}" for name, at in (("rollbacks.jsonl", 2), (EVENTS, 3), (EVENTS, 5))]
    assert found == Audit(
        counts={0: Counter({Status.APPLIED: 3}), 2: Counter({Status.APPLIED: 2})},
        rollbacks=rollbacks,
        rolled_back=Counter({0: 1, 1: 1}),
        covered=[((0, 11), rollbacks[0])],
        first_version=50,
        version=58,
        cut=cut,
        bad=found.bad,
        set_aside=2,
        unread=[(2, 71), (0, 9)],
        unread_versions=2,
    )
    show(found, Console(width=80))
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said if line.split()[:1] in (["0"], ["1"], ["2"])] == [
        ["0", "3", "0", "0", "0", "0", "0", "1"],
        ["1", "0", "0", "0", "0", "0", "0", "1"],
        ["2", "2", "0", "0", "0", "0", "0", "0"],
    ]
    assert said[-14:] == [
        *(f"{name}: the last line is cut; the audit goes to the line before it" for name in cut),
        *found.bad,
        "events.bad.jsonl: 2 lines that were no events, set aside when the server began again",
        "worker 2's update 71 is missing: one of these lines may have been its own",
        "worker 0's update 9 is missing: one of these lines may have been its own",
        "the log begins at version 50: what was before is in another directory",
        "the server went on from snapshot version-2.pt: 2 events were taken back",
        "the server went on from a state that line 2 of rollbacks.jsonl does not say: 0 events were taken back",
        "worker 0's update 11 is covered by the rollback to snapshot version-2.pt",
        "version 58: each of 5 applied updates counts once",
    ]


def test_a_log_without_a_line_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [])
    found = audit(tmp_path)
    assert (found, found.version, found.first_version, found.unreadable) == (Audit(), 0, None, 0)
    show(found, Console(width=80))
    said = capsys.readouterr().out
    assert said.endswith("version 0: each of 0 applied updates counts once\n")
    assert "set aside" not in said and "another directory" not in said


def test_the_simulation_of_several_regions_is_refused_since_each_counts_its_own_versions(tmp_path: Path) -> None:
    write(tmp_path, RUN)
    described = {"method": {"framework": {"regions": 2}}, "layout": [], "simulated": {"name": "two"}}
    (tmp_path / "run.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match="a simulation of several regions, each of which counts its own"):
        audit(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(described | {"simulated": None}))
    assert audit(tmp_path).applied == 3


def test_what_a_rollback_took_back_is_named_and_anything_else_is_lost(tmp_path: Path) -> None:
    write(tmp_path, [event(0, 0, 0, 1), event(1, 0, 1, 2), event(0, 3, 2, 3), event(1, 1, 2, 4, staleness=1)])
    write(tmp_path, [event(0, 1, 1, 3), event(1, 1, 2, 4)], events.ROLLED_BACK)
    write(tmp_path, [rollback({0: 0, 1: 0}, 2)], events.ROLLBACKS)
    found = audit(tmp_path)
    # 2 was acknowledged while the server died: no line of it was written; worker 1 came back with the same number
    assert [update for update, _ in found.covered] == [(0, 1), (0, 2)]
    assert dict(found.rolled_back) == {0: 1, 1: 1}
    write(tmp_path, [rollback({0: 0, 1: 0}, 0)], events.ROLLBACKS)
    with pytest.raises(AuditError, match="update 2 was acknowledged and is lost"):
        audit(tmp_path)
    write(tmp_path, [rollback({0: 0, 1: 1}, 2)], events.ROLLBACKS)
    with pytest.raises(AuditError, match="worker 1's update 1 is part of snapshot version-2.pt, and was taken back"):
        audit(tmp_path)


def test_two_restarts_may_have_lost_a_line_each_also_where_the_second_goes_further_back(
    tmp_path: Path,
) -> None:
    """Update 5 was acknowledged, and not written, by the first server, and 6 by the second one."""
    write(tmp_path, [event(0, number, at, at + 1) for at, number in enumerate((0, 1, 2, 7))])
    write(tmp_path, [event(0, 3, 3, 4), event(0, 4, 4, 5)], events.ROLLED_BACK)
    write(tmp_path, [rollback({0: 4}, 0, "the newer"), rollback({0: 2}, 2, "the older")], events.ROLLBACKS)
    covered = [(number, source.source) for (_, number), source in audit(tmp_path).covered]
    assert covered == [(3, "the older"), (4, "the older"), (5, "the newer"), (6, "the older")]


def test_a_bad_line_among_the_rollbacks_has_taken_back_what_the_others_have_not(tmp_path: Path) -> None:
    """Three rollbacks took back one event each; the second one's line, and then also that of its event, is bad."""
    write(tmp_path, [event(0, 0, 0, 1), event(0, 4, 1, 2)])
    write(tmp_path, [event(0, sequence, 1, 2) for sequence in (1, 2, 3)], events.ROLLED_BACK)
    write(tmp_path, [rollback({0: 0}, 1, f"snapshot {n}") for n in range(3)], events.ROLLBACKS)
    assert len(audit(tmp_path).covered) == 3 and not audit(tmp_path).bad
    path = tmp_path / events.ROLLBACKS
    path.write_text(path.read_text().replace("snapshot 1", "snap\x00"))
    found = audit(tmp_path)
    sources = [covering.source for _, covering in found.covered]
    assert sources == ["snapshot 0", "a state that line 2 of rollbacks.jsonl does not say", "snapshot 2"]
    assert f"{events.ROLLBACKS}, line 2: not a line of fairseq-async" in found.bad[0] and len(found.bad) == 1
    path = tmp_path / events.ROLLED_BACK
    path.write_text(path.read_text().replace('"sequence": 2', '"sequence": "2'))
    found = audit(tmp_path)
    assert len(found.covered) == 3 and dict(found.rolled_back) == {0: 2} and len(found.bad) == 2
    write(tmp_path, [event(0, 0, 0, 1), event(0, 9, 1, 2)])
    with pytest.raises(AuditError, match="was acknowledged and is lost"):
        audit(tmp_path)
    write(tmp_path, [event(0, 0, 0, 1)])
    path = tmp_path / events.ROLLBACKS
    path.write_text(path.read_text().replace("snapshot 2", "snap\x00"))
    assert [each.events for each in audit(tmp_path).rollbacks] == [1, 2, 0], "of two such lines the first has taken all"


def test_the_update_behind_a_snapshot_may_be_lost_though_no_line_is_taken_back(tmp_path: Path) -> None:
    """It was acknowledged, and its line is not written."""
    write(tmp_path, [event(0, 0, 0, 1), event(0, 1, 1, 2), event(0, 2, 2, 3), event(0, 4, 3, 4)])
    write(tmp_path, [rollback({0: 2}, 0)], events.ROLLBACKS)
    found = audit(tmp_path)
    assert [update for update, _ in found.covered] == [(0, 3)] and found.applied == 4


def test_a_workers_first_update_may_be_lost_with_a_server_that_has_not_written_its_line(tmp_path: Path) -> None:
    write(tmp_path, [event(0, 1, 0, 0), event(1, 0, 0, 1)])
    write(tmp_path, [rollback({}, 0)], events.ROLLBACKS)
    assert [update for update, _ in audit(tmp_path).covered] == [(0, 0)]
    write(tmp_path, [event(0, 2, 0, 0), event(1, 0, 0, 1)])
    with pytest.raises(AuditError, match="update 1 was acknowledged and is lost"):
        audit(tmp_path)
    write(tmp_path, [event(0, 0, 0, 1), event(0, 2, 0, 1)])
    write(tmp_path, [rollback({}, 0)] * 2, events.ROLLBACKS)
    with pytest.raises(AuditError, match="update 1 was acknowledged and is lost"):
        audit(tmp_path)  # its first one was written, and is there


def test_a_run_that_goes_on_in_another_directory_begins_where_it_begins(tmp_path: Path) -> None:
    write(tmp_path, [event(0, 70, 50, 51), event(1, 8, 49, 52, staleness=2), event(0, 71, 52, 53)])
    assert audit(tmp_path).first_version == 50
    write(tmp_path, [event(0, 70, 50, 51), event(0, 72, 51, 52)])
    with pytest.raises(AuditError, match="update 71 was acknowledged and is lost"):
        audit(tmp_path)


def test_a_cut_last_line_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, RUN)
    path = tmp_path / events.EVENTS
    path.write_text(path.read_text() + '{"worker": 0, "seq')
    show(audit(tmp_path), Console())
    assert "events.jsonl: the last line is cut" in capsys.readouterr().out


def test_no_word_of_the_table_is_cut_in_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, RUN)
    show(audit(tmp_path), Console(width=80))
    printed = capsys.readouterr().out
    assert "duplicate" in printed and "…" not in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no events.jsonl; give the --run-dir or --save-dir of a run"),
        ("hello\n", "line 1: not a line of fairseq-async"),
        ('{"time": 0, "worker": 0}\n', "line 1: not a line of fairseq-async: sequence: Field required"),
        ("\x00\xff\n", "line 1: not a line of fairseq-async"),
    ],
)
def test_other_files_are_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / events.EVENTS).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=message) as error:
        audit(tmp_path)
    assert "\n" not in str(error.value)


def test_the_command_ends_with_1_at_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fairseq-async", "audit", str(tmp_path)])
    for lines, code in ((RUN[:2] + RUN[3:], 1), (RUN, 0)):
        write(tmp_path, lines)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert (end.value.code or 0) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("fairseq-async: error: events.jsonl, line ")
    assert "each of 3 applied updates counts once" in said.out


def test_a_real_run_is_proved(tmp_path: Path) -> None:
    with ThreadServer(2, tmp_path) as server:
        first, second = join_patiently(server, 0, updates_per_step=2), join_patiently(server, 1, updates_per_step=2)
        for sequence in range(4):
            push(first, sequence, 0.5)
            push(second, sequence, float("nan") if sequence == 2 else 0.25)
            push(second, sequence, 0.25)  # its answer was lost
    found = audit(tmp_path)
    assert found.applied == 7 and found.version == 3 and found.counts[1][Status.DUPLICATE] == 4


@pytest.mark.parametrize("dies_at", range(4))
def test_a_death_while_events_are_taken_back_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    def settled(sequence: int) -> Receipt:
        return Receipt(0, sequence, sequence, 1.0, Status.APPLIED, 0, 1.0, sequence + 1)

    log = EventLog(tmp_path, {}, "the beginning", 0.0)
    for sequence in range(6):
        log.write(0.0, settled(sequence), Report())
    whole = events._write_whole
    left = dies_at

    def mortal(path: Path, lines: list[str]) -> None:
        nonlocal left
        if left == 0:
            path.with_name(path.name + ".part").write_text("half a li")
            raise SystemExit
        left -= 1
        whole(path, lines)

    monkeypatch.setattr(events, "_write_whole", mortal)
    try:
        EventLog(tmp_path, {0: 2}, "a snapshot", 1.0)
    except SystemExit:
        pass
    monkeypatch.undo()
    for sequences, then in (({0: 2}, 6), ({0: 1}, 7)):
        log = EventLog(tmp_path, sequences, "a snapshot", 2.0)
        log.write(3.0, Receipt(0, then, 0, 1.0, Status.APPLIED, 0, 1.0, sequences[0] + 2), Report())
    assert audit(tmp_path).applied == 3
