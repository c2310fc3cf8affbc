"""Proof, from the logs that a run has left, that every update which a worker was told of counts once."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.server.events import EVENTS, ROLLBACKS, ROLLED_BACK
from fairseq_async.server.parameter_server import Status

_SETTLED = (Status.APPLIED, Status.REFUSED, Status.STALE, Status.OUTLIER)  # these use their sequence number up
_UNSEEN = -1  # in the place of a worker of which no line tells yet
_COLUMNS = (*_SETTLED, Status.DUPLICATE, Status.FINISHED)


class AuditError(AsyncError):
    """The logs contradict themselves, or what the server promises."""


class Event(BaseModel):
    """What of a line of ``events.jsonl`` the audit needs."""

    worker: int
    sequence: int
    base_version: int
    staleness: int
    version_after: int
    status: Status


class Rollback(BaseModel):
    """A line of ``rollbacks.jsonl``: the server went on from a state after ``sequences``, and took ``events`` back."""

    time: float
    source: str
    sequences: dict[int, int]
    events: int


_Line = TypeVar("_Line", Event, Rollback)
_Update = tuple[int, int]  # worker and sequence number


@dataclass
class Audit:
    """What was found.

    Attributes:
        counts: events of each worker by status.
        rolled_back: settled events of each worker that a restart of the server took back.
        covered: acknowledged updates that are missing, each with the rollback that covers it.
        first_version: the server's before the first line: above 0 where the run goes on from another directory's.
        version: the server's after the last line.
        cut: files whose last line is not whole; the audit goes to the line before it.
    """

    counts: dict[int, Counter[Status]] = field(default_factory=lambda: defaultdict(Counter))
    rollbacks: list[Rollback] = field(default_factory=list)
    rolled_back: Counter[int] = field(default_factory=Counter)
    covered: list[tuple[_Update, Rollback]] = field(default_factory=list)
    first_version: int | None = None
    version: int = 0
    cut: list[str] = field(default_factory=list)

    @property
    def applied(self) -> int:
        return sum(count[Status.APPLIED] for count in self.counts.values())


def audit(run_dir: Path) -> Audit:
    """Reads the logs of a run, which may still be going on.

    A worker takes the next sequence number only when the one before was acknowledged. So a number that is missing is
    an acknowledged update that was lost, unless the server's restart from a snapshot took it back, and a number that
    comes twice is an update that was applied twice.

    Raises:
        AuditError: the first violation.
        ConfigurationError: there is no log of a run.
    """
    if not (run_dir / EVENTS).is_file():
        raise ConfigurationError(f"{run_dir}: there is no {EVENTS}; give the --run-dir or --save-dir of a run")
    found = Audit()
    covering = _covering(run_dir, found)
    last: dict[int, int] = {}
    for number, event in _read(run_dir / EVENTS, Event, found):
        where = f"{EVENTS}, line {number}: worker {event.worker}'s update {event.sequence}"
        found.counts[event.worker][event.status] += 1
        if event.status in _SETTLED:
            if found.first_version is None:
                found.first_version = found.version = event.base_version + event.staleness
            _check_sequence(event, last.get(event.worker), covering, found, where)
            _check_version(event, found, where)
            last[event.worker] = event.sequence
        elif event.status is Status.DUPLICATE and event.sequence > last.get(event.worker, -1):
            raise AuditError(f"{where} was called a duplicate, but was never settled")
    return found


def _check_version(event: Event, found: Audit, where: str) -> None:
    """A step makes a version, and nothing else does; an update starts from a version that there was."""
    before, found.version = found.version, event.version_after
    if not 0 <= found.version - before <= (event.status is Status.APPLIED):
        raise AuditError(f"{where} ({event.status.value}) took the server from version {before} to {found.version}")
    if min(event.staleness, event.base_version) < 0 or event.base_version + event.staleness > before:
        raise AuditError(f"{where} started from version {event.base_version}, {event.staleness} before {before}")


def _check_sequence(
    event: Event, last: int | None, covering: dict[_Update, Rollback], found: Audit, where: str
) -> None:
    if last is None:
        last = event.sequence - 1 if found.first_version else -1  # before the first line it may have sent others
    if event.sequence <= last:
        raise AuditError(f"{where} comes after its update {last}: it counts twice")
    for missing in range(last + 1, event.sequence):
        update = event.worker, missing
        rollback = covering.get(update) or (covering.get((_UNSEEN, missing)) if last == -1 else None)
        if rollback is None:
            raise AuditError(f"{where} comes after its update {last}: update {missing} was acknowledged and is lost")
        found.covered.append((update, rollback))


def _covering(run_dir: Path, found: Audit) -> dict[_Update, Rollback]:
    """The rollback by which each update was taken back.

    For each worker it may be one more than the log knows of: a server that dies may have acknowledged an update, and
    not have written its line.
    """
    found.rollbacks = [rollback for _, rollback in _read(run_dir / ROLLBACKS, Rollback, found)]
    lines = _read(run_dir / ROLLED_BACK, Event, found)
    covering: dict[_Update, Rollback] = {}
    latest: dict[int, int] = defaultdict(lambda: -1)
    for index, rollback in enumerate(found.rollbacks):
        covering[_UNSEEN, index] = rollback
        for worker, sequence in rollback.sequences.items():
            latest[worker] = max(latest[worker], sequence)
        for number, event in islice(lines, rollback.events):
            if event.status not in _SETTLED:
                continue
            if event.sequence <= rollback.sequences.get(event.worker, -1):
                what = f"{ROLLED_BACK}, line {number}: worker {event.worker}'s update {event.sequence}"
                raise AuditError(f"{what} is part of {rollback.source}, and was taken back")
            found.rolled_back[event.worker] += 1
            covering[event.worker, event.sequence] = rollback
            latest[event.worker] = max(latest[event.worker], event.sequence)
        for worker in latest:
            latest[worker] += 1
            covering.setdefault((worker, latest[worker]), rollback)
    return covering


def show(found: Audit, console: Console) -> None:
    """The counts, what was taken back, and what the audit does not see."""
    table = Table("worker", *(status.value for status in _COLUMNS), "rolled back")
    for worker in sorted({*found.counts, *found.rolled_back}):
        counts = (found.counts[worker][status] for status in _COLUMNS)
        table.add_row(str(worker), *map(str, counts), str(found.rolled_back[worker]))
    console.print(table)
    for line in _remarks(found):
        console.print(line, highlight=False, soft_wrap=True)


def _remarks(found: Audit) -> Iterator[str]:
    for name in found.cut:
        yield f"{name}: the last line is cut; the audit goes to the line before it"
    if found.first_version:
        yield f"the log begins at version {found.first_version}: what was before is in another directory"
    for rollback in found.rollbacks:
        yield f"the server went on from {rollback.source}: {rollback.events} events were taken back"
    for (worker, sequence), rollback in found.covered:
        yield f"worker {worker}'s update {sequence} is covered by the rollback to {rollback.source}"
    yield f"version {found.version}: each of {found.applied} applied updates counts once"


def _read(path: Path, kind: type[_Line], found: Audit) -> Iterator[tuple[int, _Line]]:
    """The lines with their numbers, up to the last whole one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                found.cut.append(path.name)
                return
            try:
                yield number, kind.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ConfigurationError(
                    f"{path}, line {number}: not a line of fairseq-async: {key + ': ' if key else ''}{first['msg']}"
                ) from error
