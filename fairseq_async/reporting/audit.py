"""``fairseq-async audit``: checks from a run's logs that every acknowledged update counts exactly once."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.protocol.receipt import SETTLED, Status
from fairseq_async.records.description import RunDescription
from fairseq_async.records.event_log import BAD, EVENTS, ROLLBACKS, ROLLED_BACK
from fairseq_async.records.events import Event, LineReader, Rollback
from fairseq_async.reporting import GIVE_A_RUN

_Line = TypeVar("_Line")
_UNSEEN = -1  # stands for a worker of which the logs have no line yet
_COLUMNS = tuple(status for status in Status if status in SETTLED) + (Status.DUPLICATE, Status.FINISHED)


class AuditError(AsyncError):
    """The logs contradict themselves, or what the server promises."""


_Update = tuple[int, int]  # worker and sequence number


@dataclass
class Audit:
    """The findings of an audit.

    Attributes:
        counts: number of events of each worker, by status.
        rolled_back: number of settled events of each worker that a restart of the server took back.
        covered: acknowledged updates that are missing, each with the rollback that explains it.
        first_version: the server's version before the first line: above 0 where the run goes on from another directory.
        version: the server's version after the last line.
        cut: files whose last line is not whole; the audit ends at the line before it.
        bad: what is wrong with each line that is no event, or no rollback.
        set_aside: how many such lines a restart has moved to another file.
        unread: missing updates, which may have been recorded in lines that are no events.
        unread_versions: number of missing versions, which such updates may have made.
    """

    counts: dict[int, Counter[Status]] = field(default_factory=lambda: defaultdict(Counter))
    rollbacks: list[Rollback] = field(default_factory=list)
    rolled_back: Counter[int] = field(default_factory=Counter)
    covered: list[tuple[_Update, Rollback]] = field(default_factory=list)
    first_version: int | None = None
    version: int = 0
    cut: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    set_aside: int = 0
    unread: list[_Update] = field(default_factory=list)
    unread_versions: int = 0

    @property
    def unreadable(self) -> int:
        """How many lines are no events."""
        return len(self.bad) + self.set_aside

    @property
    def applied(self) -> int:
        """How many updates were applied."""
        return sum(count[Status.APPLIED] for count in self.counts.values())


def audit(run_dir: Path) -> Audit:
    """Checks the logs of a run, which may still be going on.

    A worker takes the next sequence number only when the one before was acknowledged. So a number that is missing is
    an acknowledged update that was lost, unless the server's restart from a snapshot took it back, and a number that
    comes twice is an update that was applied twice.

    Raises:
        AuditError: the first violation.
        ConfigurationError: there is no log of a run.
    """
    if not (run_dir / EVENTS).is_file():
        raise ConfigurationError(f"{run_dir}: there is no {EVENTS}; {GIVE_A_RUN}")
    if _has_regions(run_dir):
        raise ConfigurationError(f"{run_dir}: a simulation of several regions, each of which counts its own versions")
    found = Audit()
    found.set_aside = _lines(run_dir / BAD)
    covering = _covering(run_dir, found)
    last, bad_besides = dict[int, int](), len(found.bad)
    events = LineReader(run_dir / EVENTS, Event.from_json, found.bad.append)
    for event in events:
        where = f"{EVENTS}, line {events.number}: worker {event.worker}'s update {event.sequence}"
        found.counts[event.worker][event.status] += 1
        if event.status in SETTLED:
            if found.first_version is None:
                found.first_version = found.version = event.base_version + event.staleness
            _check_sequence(event, last.get(event.worker), covering, found, where)
            _check_version(event, found, where)
            last[event.worker] = event.sequence
        elif event.status is Status.DUPLICATE and event.sequence > last.get(event.worker, -1):
            raise AuditError(f"{where} was called a duplicate, but was never settled")
    if len(found.bad) > bad_besides and not found.counts:
        raise ConfigurationError(found.bad[bad_besides])
    _note_cut(events, found)
    return found


def _has_regions(run_dir: Path) -> bool:
    try:
        return RunDescription.read(run_dir).has_regions
    except ConfigurationError:  # the logs say all that is checked
        return False


def _check_version(event: Event, found: Audit, where: str) -> None:
    """Checks what has made a version, and that the update started from a version that existed.

    Only an applied update, or a merge with a global server's parameters, makes a version.
    """
    before, found.version = found.version, event.version_after
    before += sum(version > before for version in event.merged)
    missing = max(0, found.version - before - (event.status is Status.APPLIED))
    found.unread_versions += missing
    if found.version < before or found.unread_versions > found.unreadable:
        raise AuditError(f"{where} ({event.status.value}) took the server from version {before} to {found.version}")
    if min(event.staleness, event.base_version) < 0 or event.base_version + event.staleness > before + missing:
        raise AuditError(f"{where} started from version {event.base_version}, {event.staleness} before {before}")


def _check_sequence(
    event: Event, last: int | None, covering: dict[_Update, Rollback], found: Audit, where: str
) -> None:
    """Checks that no number comes twice, and that a rollback explains each one that is missing."""
    if last is None:
        # where the run goes on from another directory, earlier numbers are in that one's log
        last = event.sequence - 1 if found.first_version else -1
    if event.sequence <= last:
        raise AuditError(f"{where} comes after its update {last}: it counts twice")
    for missing in range(last + 1, event.sequence):
        update = event.worker, missing
        rollback = covering.get(update) or (covering.get((_UNSEEN, missing)) if last == -1 else None)
        if rollback is None:
            found.unread.append(update)
            if len(found.unread) <= found.unreadable:
                continue
            raise AuditError(f"{where} comes after its update {last}: update {missing} was acknowledged and is lost")
        found.covered.append((update, rollback))


def _covering(run_dir: Path, found: Audit) -> dict[_Update, Rollback]:
    """Returns, for each update that was taken back, the rollback that took it back.

    That may be one update more of each worker than the log has: a server that dies may have acknowledged an update and
    not yet written its line.
    """
    found.rollbacks = _rollbacks(run_dir, found)
    reader = LineReader(run_dir / ROLLED_BACK, Event.from_json, found.bad.append)
    taken_back = _numbered(reader)
    covering: dict[_Update, Rollback] = {}
    latest: dict[int, int] = defaultdict(lambda: -1)
    first = 1  # number of the rollback's first line
    for index, rollback in enumerate(found.rollbacks):
        covering[_UNSEEN, index] = rollback
        for worker, sequence in rollback.sequences.items():
            latest[worker] = max(latest[worker], sequence)
        for number in range(first, first + rollback.events):
            event = taken_back.get(number)
            if event is None or event.status not in SETTLED:
                continue
            if event.sequence <= rollback.sequences.get(event.worker, -1):
                what = f"{ROLLED_BACK}, line {number}: worker {event.worker}'s update {event.sequence}"
                raise AuditError(f"{what} is part of {rollback.source}, and was taken back")
            found.rolled_back[event.worker] += 1
            covering[event.worker, event.sequence] = rollback
            latest[event.worker] = max(latest[event.worker], event.sequence)
        first += rollback.events
        for worker in latest:
            latest[worker] += 1
            covering.setdefault((worker, latest[worker]), rollback)
    _note_cut(reader, found)
    return covering


def _rollbacks(run_dir: Path, found: Audit) -> list[Rollback]:
    """Returns all rollbacks; one whose line cannot be read has taken back what the others have not."""
    reader = LineReader(run_dir / ROLLBACKS, Rollback.model_validate_json, found.bad.append)
    read = _numbered(reader)
    _note_cut(reader, found)
    left = max(0, _lines(run_dir / ROLLED_BACK) - sum(rollback.events for rollback in read.values()))
    for number in sorted(set(range(1, reader.number + 1)) - set(read)):
        source = f"a state that line {number} of {ROLLBACKS} does not say"
        read[number], left = Rollback(time=0.0, source=source, sequences={}, events=left), 0
    return [read[number] for number in sorted(read)]


def _numbered(reader: LineReader[_Line]) -> dict[int, _Line]:
    """Returns the lines that can be read by their numbers."""
    found = {}
    for line in reader:
        found[reader.number] = line
    return found


def _lines(path: Path) -> int:
    """Counts the whole lines of a file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def _note_cut(reader: LineReader[Event] | LineReader[Rollback], found: Audit) -> None:
    if reader.cut:
        found.cut.append(reader.path.name)


def show(found: Audit, console: Console) -> None:
    """Prints the counts, what was taken back, and what the audit does not see."""
    columns = ("worker", *(status.value for status in _COLUMNS), "rolled\nback")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)  # as narrow as a terminal of 80 columns
    for worker in sorted({*found.counts, *found.rolled_back}):
        counts = (found.counts[worker][status] for status in _COLUMNS)
        table.add_row(str(worker), *map(str, counts), str(found.rolled_back[worker]))
    console.print(table)
    for line in _remarks(found):
        console.print(line, highlight=False, soft_wrap=True)


def _remarks(found: Audit) -> Iterator[str]:
    for name in found.cut:
        yield f"{name}: the last line is cut; the audit goes to the line before it"
    yield from found.bad
    if found.set_aside:
        yield f"{BAD}: {found.set_aside} lines that were no events, set aside when the server began again"
    for worker, sequence in found.unread:
        yield f"worker {worker}'s update {sequence} is missing: one of these lines may have been its own"
    if found.first_version:
        yield f"the log begins at version {found.first_version}: what was before is in another directory"
    for rollback in found.rollbacks:
        yield f"the server went on from {rollback.source}: {rollback.events} events were taken back"
    for (worker, sequence), rollback in found.covered:
        yield f"worker {worker}'s update {sequence} is covered by the rollback to {rollback.source}"
    yield f"version {found.version}: each of {found.applied} applied updates counts once"
