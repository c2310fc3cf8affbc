"""``events.jsonl``, which has one line for every settled update, and the files that a replay needs besides."""

import errno
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import torch
from pydantic_core import from_json
from torch import Tensor

from fairseq_async.errors import why_not_written
from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Report
from fairseq_async.protocol.notices import Tell, tell_log
from fairseq_async.protocol.receipt import Receipt
from fairseq_async.records.recording import record_vector

EVENTS, ROLLED_BACK, ROLLBACKS = "events.jsonl", "events.rolled-back.jsonl", "rollbacks.jsonl"
BAD = "events.bad.jsonl"
_LARGEST = torch.finfo(torch.float32).max
PADDING = b"\0"  # bytes that a power failure may leave before a line
# A line as this module writes it: to parse the JSON of millions of them would take minutes at each restart.
_OUR_LINE = re.compile(rb'\{"time": [-+.e\d]+, "worker": (\d+), "sequence": (\d+), [^\0]*\}\n')


@dataclass(frozen=True)
class ControlEvent:
    """A change of a rule's round size, or an epoch's begin or end, between two updates. A replay repeats it."""

    event: Literal["limit_round", "begin_epoch", "end_epoch"]
    updates: int | None = None
    epoch: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Settled:
    """An update that was settled, for the log.

    Attributes:
        held_seconds: how long it waited for others; 0 if it did not wait.
        merged: the versions made by merging parameters of a server above since the update before.
    """

    receipt: Receipt
    report: Report
    control_events: tuple[ControlEvent, ...] = ()
    held_seconds: float = 0.0
    merged: tuple[int, ...] = ()

    @property
    def recorded(self) -> JsonObject:
        """The fields for its line in the log besides those of receipt and report."""
        own: JsonObject = {}
        if self.held_seconds:
            own["held_seconds"] = self.held_seconds
        if self.merged:
            own["merged"] = list(self.merged)
        return own


class EventLog:
    """Appends whole lines, so that a reader may follow the file while the run goes on.

    Args:
        run_dir: where the file is.
        sequences: the sequence number of each worker's last settled update. Later events were taken back by a restart,
            or belong to another run: they go to ``events.rolled-back.jsonl``, and ``rollbacks.jsonl`` says how many,
            when and why. Their number is 0 where a lost update was acknowledged, but not written yet.
        source: the name of the state from which the run goes on.
        time: seconds since 1970.
        tell: passes a line to the user, such as that something could not be written or read.
    """

    def __init__(
        self, run_dir: Path, sequences: Mapping[int, int], source: str, time: float, tell: Tell = tell_log
    ) -> None:
        self._run_dir, self._tell, self._lacks = run_dir, tell, set[str]()
        path = run_dir / EVENTS
        bad = _take_back(path, sequences, source, time) if path.exists() else 0
        if bad:
            tell(f"{path}: {bad} lines were no events; they are in {BAD}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, time: float, receipt: Receipt, report: Report, extra: JsonObject | None = None) -> None:
        """Appends the line of one update; on a full disk the run goes on without it.

        Args:
            time: seconds since 1970, or a simulation's.
            extra: further fields of the line, such as a checksum.
        """
        own: JsonObject = {
            "time": time,
            "worker": receipt.worker,
            "sequence": receipt.sequence,
            "base_version": receipt.base_version,
            "staleness": receipt.staleness,
            "weight": receipt.weight,
            "norm": receipt.norm,
            "cosine": receipt.cosine,
            "version_after": receipt.version,
            "status": receipt.status.value,
        }
        reported = {key: measured(value) for key, value in vars(report).items() if value is not None}
        event = own | reported | (extra or {})
        line = json.dumps({key: finite(value) for key, value in event.items()}).encode() + b"\n"
        with self._or_without("events"):
            size = os.fstat(self._file).st_size
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, size)  # readers see whole lines only
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def keep(self, path: Path, vector: Tensor) -> None:
        """Keeps a vector that a replay cannot compute, 4 bytes a value; on a full disk the run goes on without it."""
        with self._or_without("vectors for a replay"):
            record_vector(path, vector)

    @contextmanager
    def _or_without(self, what: str) -> Iterator[None]:
        """Tells once that these cannot be written, until they can be again."""
        try:
            yield
            self._lacks.discard(what)
        except (OSError, RuntimeError) as error:  # torch makes one of the other when the disk is full
            if what not in self._lacks:
                self._tell(f"{what} are not recorded: {why_not_written(error, self._run_dir)}; the run goes on")
            self._lacks.add(what)


def finite(value: object) -> object:
    """Returns ``value``, or None for NaN and Inf, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measured(value: object) -> object:
    """Returns ``value``, or None for a float beyond fp32: that is no measurement, and readers could not add it up."""
    return None if isinstance(value, float) and not abs(value) <= _LARGEST else value


def _take_back(path: Path, sequences: Mapping[int, int], source: str, time: float) -> int:
    """Moves the events after these sequence numbers; a death before the last file is written leaves this to the next
    restart. Lines that are no events go to ``events.bad.jsonl``; their number is returned.

    The log of a long run has more lines than memory has room for: they are read and written one by one.
    """
    rolled_back, rollbacks, bad = (path.with_name(name) for name in (ROLLED_BACK, ROLLBACKS, BAD))
    kinds = Counter(covered for _, covered in _judged(path, sequences))
    counts = [_count(line) for line in _whole_lines(rollbacks)]
    counted = None if None in counts else sum(count or 0 for count in counts)
    _write_whole(rolled_back, chain(islice(_whole_lines(rolled_back), counted), _those(path, sequences, False)))
    rollback = {"time": time, "source": source, "sequences": dict(sequences), "events": kinds[False]}
    _write_whole(rollbacks, chain(_whole_lines(rollbacks), [json.dumps(rollback).encode() + b"\n"]))
    if kinds[None]:
        _write_whole(bad, chain(_whole_lines(bad), _those(path, sequences, None)))
    if kinds[None] or kinds[False] or _is_cut(path):  # on a full disk, a log that stays as it is needs no second one
        _write_whole(path, _those(path, sequences, True))
    return kinds[None]


def _judged(path: Path, sequences: Mapping[int, int]) -> Iterator[tuple[bytes, bool | None]]:
    """Yields each whole line, and whether its update is not after these numbers; None where the line is no event."""
    for line in _whole_lines(path):
        yield line, _covered(line, sequences)


def _those(path: Path, sequences: Mapping[int, int], wanted: bool | None) -> Iterator[bytes]:
    """Yields the lines of one kind of :func:`_judged`."""
    for line, covered in _judged(path, sequences):
        if covered is wanted:
            yield line if wanted is None else line.lstrip(PADDING)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _is_cut(path: Path) -> bool:
    """Whether the file ends in the middle of a line, behind which no other may be written."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read() != b"\n"


def _write_whole(path: Path, lines: Iterable[bytes]) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.writelines(lines)
    part.replace(path)


def _covered(line: bytes, sequences: Mapping[int, int]) -> bool | None:
    """Whether the update of this event is not after these sequence numbers; None where the line is no event."""
    if (ours := _OUR_LINE.fullmatch(line)) is not None:
        return int(ours[2]) <= sequences.get(int(ours[1]), -1)
    event = _parsed(line)
    worker, sequence = event.get("worker"), event.get("sequence")
    if not (isinstance(worker, int) and isinstance(sequence, int)):
        return None
    return sequence <= sequences.get(worker, -1)


def _count(line: bytes) -> int | None:
    count = _parsed(line).get("events")
    return count if isinstance(count, int) else None


def _parsed(line: bytes) -> JsonObject:
    try:
        parsed = from_json(line.lstrip(PADDING))
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
