"""What the server writes down of a run."""

import math
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Report
from fairseq_async.protocol.receipt import Receipt, Status
from fairseq_async.records.event_log import BAD, EVENTS, ROLLBACKS, ROLLED_BACK, EventLog, Settled
from fairseq_async.records.events import Event, LineReader, read_events
from fairseq_async.records.recording import checksum, read_vector, record_vector
from fairseq_async.reporting.audit import AuditError, audit, show
from tests.helpers.run_files import events, snapshot_versions
from tests.helpers.server_client import StartServer, StartThreadServer, join, join_patiently, kill, pull, push
from tests.helpers.waiting import wait_until


def test_a_checksum_tells_one_bit() -> None:
    vector = torch.ones(5)
    before = checksum(vector)
    vector.view(torch.int32)[3] ^= 1
    assert before == checksum(torch.ones(5)) != checksum(vector) and len(before) == 8


def test_whatever_is_settled_is_a_line_that_can_be_read(tmp_path: Path) -> None:
    """JSON has no Inf; a weight above what fp32 has is a weight all the same, and a loss above that no measurement."""
    log = EventLog(tmp_path, {}, "the beginning", 0.0)
    receipt = Receipt(1, 0, 0, 1e300, Status.APPLIED, 0, math.inf, 1)
    log.write(0.0, receipt, Report(loss=1e300, tokens=5.0, progress=-1e300))
    [event] = read_events(tmp_path / EVENTS)
    assert event.progress is None and (event.weight, event.norm, event.loss, event.tokens) == (1e300, None, None, 5.0)


def test_a_line_has_all_that_the_receipt_the_report_and_the_server_say(tmp_path: Path) -> None:
    report = Report(loss=8.0, tokens=9.0, epochs=0.5, local_steps=10, shard=11, offset=12, push_seconds=0.25)
    receipt = Receipt(1, 2, 3, 4.0, Status.OUTLIER, 5, 6.0, 7, cosine=-0.5)
    settled = Settled(receipt, report, held_seconds=0.75, merged=(13, 14))
    EventLog(tmp_path, {}, "the beginning", 0.0).write(15.5, receipt, report, settled.recorded)
    assert Settled(receipt, report).recorded == {}
    server = {"time": 15.5, "worker": 1, "sequence": 2, "base_version": 3, "weight": 4.0, "staleness": 5, "norm": 6.0}
    server |= {"version_after": 7, "cosine": -0.5, "held_seconds": 0.75, "merged": (13, 14)}
    reported = {"loss": 8.0, "tokens": 9.0, "epochs": 0.5, "local_steps": 10, "shard": 11, "offset": 12}
    expected = Event(status=Status.OUTLIER, push_seconds=0.25, **server, **reported)  # type: ignore[arg-type]
    assert read_events(tmp_path / EVENTS) == [expected]
    assert events(tmp_path)[0].keys() == server.keys() | reported.keys() | {"status", "push_seconds"}, "nothing else"


def test_what_cannot_be_written_is_told_once_until_it_can_be_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of which the disk takes a part is no line; vectors are told of besides."""
    told, write, takes = list[str](), os.write, [99, 9, 9, 99, 9, 9]
    log = EventLog(tmp_path, {}, "the beginning", 0.0, told.append)
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[: 9999 if takes.pop(0) == 99 else 9]))
    for sequence in range(6):
        log.write(0.0, Receipt(0, sequence, 0, 1.0, Status.APPLIED, 0, 1.0, sequence), Report())
    assert [event["sequence"] for event in events(tmp_path)] == [0, 3]
    assert told == [f"events are not recorded: the disk is full; make room in {tmp_path}; the run goes on"] * 2
    (tmp_path / "updates").touch()
    for _ in range(2):
        log.keep(tmp_path / "updates" / "one.pt", torch.ones(2))
    assert [line.partition(":")[0] for line in told[2:]] == ["vectors for a replay are not recorded"]
    (tmp_path / "updates").unlink()
    log.keep(tmp_path / "updates" / "one.pt", torch.ones(2))
    assert len(told) == 3 and read_vector(tmp_path / "updates" / "one.pt", 2).tolist() == [1.0, 1.0]


def test_a_restart_leaves_each_line_in_the_file_of_its_kind_as_it_was(tmp_path: Path) -> None:
    """Zeros before an event go, those before what is none stay; a rollback of which nobody knows how much it took back
    leaves all that was taken back."""
    ours = [b'{"time": 1.0, "worker": 0, "sequence": %d, "x": 1}\n' % number for number in range(3)]
    others, bad = [b'{"worker": 2, "sequence": %d}\n' % number for number in range(2)], [b"\0\0{}\n", b"[1]\n"]
    (tmp_path / EVENTS).write_bytes(
        ours[0] + b"\0\0" + ours[1] + bad[0] + others[0] + bad[1] + b"\0" + others[1] + ours[2]
    )
    before = {ROLLED_BACK: ours[2] * 2, ROLLBACKS: b'{"events": "two"}\n', BAD: b"an earlier one\n"}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    EventLog(tmp_path, {0: 1, 2: 0}, "a snapshot", 2.5)
    assert (tmp_path / EVENTS).read_bytes() == ours[0] + ours[1] + others[0]
    assert (tmp_path / ROLLED_BACK).read_bytes() == before[ROLLED_BACK] + others[1] + ours[2]
    assert (tmp_path / BAD).read_bytes() == before[BAD] + b"".join(bad)
    said = b'{"time": 2.5, "source": "a snapshot", "sequences": {"0": 1, "2": 0}, "events": 2}\n'
    assert (tmp_path / ROLLBACKS).read_bytes() == before[ROLLBACKS] + said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([EVENTS, *before]), "nothing is left over"


def test_a_log_without_a_line_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    file, told = (tmp_path / EVENTS).stat().st_ino, list[str]()
    EventLog(tmp_path, {}, "a snapshot", 1.0, told.append)
    assert (tmp_path / EVENTS).stat().st_ino == file and not told and not (tmp_path / BAD).exists()
    (tmp_path / "new").mkdir()
    EventLog(tmp_path / "new", {}, "the beginning", 1.0, told.append)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [EVENTS] and not told


def test_a_restart_moves_what_is_not_in_its_state_and_writes_a_log_that_stays_as_it_is_no_second_time(
    tmp_path: Path,
) -> None:
    """Lines of other writers, with positions in them, are judged as those of this one; a cut line is dropped."""
    log = EventLog(tmp_path, {}, "the beginning", 0.0)
    for sequence in range(4):
        log.write(0.0, Receipt(0, sequence, 0, 1.0, Status.APPLIED, 0, 1.0, sequence), Report(position={"seen": 1}))
        log.write(0.0, Receipt(1, sequence, 0, 1.0, Status.APPLIED, 0, 1.0, sequence), Report(loss=2.0))
    path = tmp_path / EVENTS
    EventLog(tmp_path, {0: 2, 1: 1}, "a snapshot", 1.0)
    kept = [(event.worker, event.sequence) for event in read_events(path)]
    assert kept == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    moved = [(event.worker, event.sequence) for event in read_events(tmp_path / ROLLED_BACK)]
    assert moved == [(1, 2), (0, 3), (1, 3)]
    file = path.stat().st_ino
    EventLog(tmp_path, {0: 2, 1: 1}, "a snapshot", 2.0)
    assert path.stat().st_ino == file
    with path.open("ab") as cut:
        cut.write(b'{"time": 1.0, "wor')
    EventLog(tmp_path, {0: 2, 1: 1}, "a snapshot", 3.0)
    assert path.stat().st_ino != file and len(list(read_events(path))) == 5
    with path.open("ab") as other:
        other.write(b'{"is": "no event"}\n')
    told = list[str]()
    EventLog(tmp_path, {0: 2, 1: 1}, "a snapshot", 4.0, told.append)
    assert len(list(read_events(path))) == 5 and told == [f"{path}: 1 lines were no events; they are in {BAD}"]
    assert read_events(tmp_path / "of a run without updates") == read_events(path / "no directory") == []


def test_what_a_server_has_moved_that_died_before_it_said_so_is_moved_once(tmp_path: Path) -> None:
    lines = [b'{"worker": 0, "sequence": %d}\n' % number for number in range(4)]
    (tmp_path / EVENTS).write_bytes(b"".join(lines))
    EventLog(tmp_path, {0: 3}, "a newer one", 0.5)
    EventLog(tmp_path, {0: 2}, "a snapshot", 1.0)
    for name in (EVENTS, ROLLED_BACK):  # the worker has sent its update again, and the server has died amid a restart
        append(tmp_path / name, lines[3])
    EventLog(tmp_path, {0: 2}, "a snapshot", 2.0)
    assert (tmp_path / ROLLED_BACK).read_bytes() == lines[3] * 2


def test_a_file_that_is_replaced_twice_between_two_looks_is_a_new_one_though_the_disk_uses_its_inode_again(
    tmp_path: Path,
) -> None:
    path, new = tmp_path / EVENTS, tmp_path / "new"
    path.write_text("1\n2\n")
    reader, inode = LineReader(path, int), path.stat().st_ino
    assert list(reader) == [1, 2]
    for _ in range(100):  # most file systems use an inode again at the second one
        new.write_text("3\n4\n5\n")
        new.replace(path)
        if path.stat().st_ino == inode:
            break
    assert list(reader) == [3, 4, 5] and (reader.number, reader.replaced) == (3, 1)
    with path.open("a") as file:
        file.write("6\n")
    assert list(reader) == [6] and reader.replaced == 1


def test_a_reader_that_nobody_has_any_more_has_no_file_open(tmp_path: Path) -> None:
    path, before = tmp_path / EVENTS, len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        path.write_text("1\n")
        reader = LineReader(path, int)
        assert list(reader) == [1]
        path.unlink()
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_gives_each_line_once_and_knows_whether_the_last_is_whole(tmp_path: Path) -> None:
    """Also of a file that is cut short and goes on, or is replaced twice: it has one file open, the present one."""
    path, skipped = tmp_path / EVENTS, list[str]()
    reader = LineReader(path, Event.from_json, skipped.append)
    event = b'{"time": 1, "worker": 0, "sequence": %d, "base_version": 0, "staleness": 0, "weight": 1, '
    event += b'"version_after": 1, "status": "applied"}\n'
    before = len(os.listdir("/proc/self/fd"))

    def look() -> tuple[list[int], int, int, bool]:
        return [each.sequence for each in reader], reader.number, reader.replaced, reader.cut

    assert look() == ([], 0, 0, False), "there is no file"
    path.write_bytes(event % 1 + b"no event\n\0\0" + (event % 2) + (event % 3)[:20])
    assert look() == ([1, 2], 3, 0, True) and len(skipped) == 1 and f"{path}, line 2: " in skipped[0]
    assert look() == ([], 3, 0, True)
    append(path, (event % 3)[20:])
    assert look() == ([3], 4, 0, False) and look() == ([], 4, 0, False)
    with path.open("r+b") as file:
        file.truncate(len(event % 1))
    assert look() == ([1], 1, 1, False)
    for number in (7, 8):
        (tmp_path / "new").write_bytes(event % number)
        (tmp_path / "new").replace(path)
        assert look() == ([number], 1, number - 5, False)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    append(path, b"none\n" + event % 9)
    reader.skip_to_end()
    assert look() == ([], 3, 3, False) and len(skipped) == 1
    with pytest.raises(ConfigurationError, match=f"{path}, line 2: not a line of fairseq-async"):
        read_events(path)


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


def test_a_vector_is_recorded_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    record_vector(tmp_path / "updates" / "one.pt", torch.arange(100_000.0)[7:9])
    assert (tmp_path / "updates" / "one.pt").stat().st_size < 4_000
    assert read_vector(tmp_path / "updates" / "one.pt", 2).tolist() == [7.0, 8.0]


@pytest.mark.parametrize(("waited", "seconds"), [(None, 3.0), (0.0, 0.0), (0.5, 0.5)])
def test_what_a_worker_waited_is_its_exchange_also_where_that_is_nothing(waited: float | None, seconds: float) -> None:
    event = Event(0.0, 0, 0, 0, 0, 1.0, 1, Status.APPLIED, push_seconds=1.0, pull_seconds=2.0, waiting_seconds=waited)
    assert event.exchange_seconds == seconds
    assert Event(0.0, 0, 0, 0, 0, 1.0, 1, Status.APPLIED).exchange_seconds == 0.0
