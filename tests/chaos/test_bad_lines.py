"""Lines of ``events.jsonl`` that are no events cost neither a recovery nor a new run, and the audit names them."""

from pathlib import Path

import pytest
from rich.console import Console

from fairseq_async.protocol import Status
from fairseq_async.records.event_log import BAD, EVENTS, ROLLBACKS, ROLLED_BACK
from fairseq_async.reporting.audit import AuditError, audit, show
from tests.helpers.run_files import events, snapshot_versions
from tests.helpers.server_client import StartServer, StartThreadServer, join, join_patiently, kill, pull, push
from tests.helpers.waiting import wait_until

GARBAGE = [b"\0\0\0\n", b"{}\n", b'{"worker": 0, "sequence": "a"}\n', b"\xff\xfe\n", b"[" * 3000 + b"\n", b"7\n"]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def remarks(run_dir: Path) -> str:
    console = Console(record=True, width=200, file=(run_dir / "audit.txt").open("w"))
    show(audit(run_dir), console)
    return console.export_text()


def test_a_killed_server_goes_on_though_lines_are_bad(start_server: StartServer, tmp_path: Path) -> None:
    """Also one of zero bytes and an event, as a machine that has lost its power may leave it."""
    server = start_server(workers=1)
    worker = join_patiently(server, 0, workers=1, snapshot_seconds=1e-3)
    push(worker, 0, 0.125)
    append(tmp_path / EVENTS, b"".join(GARBAGE) + b"\0" * 100)
    push(worker, 1, 0.125, base=1)
    assert audit(tmp_path).applied == 2 and f"{EVENTS}, line 2" in remarks(tmp_path)
    wait_until(lambda: snapshot_versions(tmp_path)[-1:] == [2])
    kill(server)
    assert push(worker, 2, 0.125, base=2).status is Status.APPLIED
    assert pull(worker) == (3, 0.625)
    assert [event["sequence"] for event in events(tmp_path)] == [0, 1, 2]
    assert (tmp_path / BAD).read_bytes() == b"".join(GARBAGE)
    assert f"{BAD}: {len(GARBAGE)} lines that were no events" in remarks(tmp_path)


@pytest.mark.parametrize("name", [EVENTS, ROLLBACKS, ROLLED_BACK])
def test_a_new_run_begins_where_one_has_left_bad_lines(
    start_thread_server: StartThreadServer, tmp_path: Path, name: str
) -> None:
    before = start_thread_server(1)
    push(join(before, 0, workers=1), 0, 0.125)
    before.stop()
    for bad in GARBAGE:
        append(tmp_path / name, bad)
    worker = join(start_thread_server(1), 0, workers=1)
    assert push(worker, 0, 0.25).status is Status.APPLIED
    assert [event["norm"] > 0.5 for event in events(tmp_path)] == [True]


def test_an_event_that_became_unreadable_may_be_missing_and_no_other(
    start_thread_server: StartThreadServer, tmp_path: Path
) -> None:
    worker = join(start_thread_server(1), 0, workers=1)
    for sequence in range(4):
        push(worker, sequence, 0.125, base=sequence)
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(lines[0] + b"\0\0\0" + lines[1][5:] + b"".join(lines[2:]))
    found = audit(tmp_path)
    assert found.unread == [(0, 1)] and found.version == 4 and len(found.bad) == 1
    (tmp_path / EVENTS).write_bytes(lines[0] + b"\0\0\0" + lines[1][5:] + lines[3])
    with pytest.raises(AuditError, match="update 2 was acknowledged and is lost"):
        audit(tmp_path)
