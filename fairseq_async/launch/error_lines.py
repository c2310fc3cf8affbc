"""Finds the line of a worker's output that says why the worker ended."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_OURS = "fairseq-async: error: "
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored "  # Python's line before what a destructor has raised, which ends no process
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of a traceback's lines
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")
# the system's words, and torch's where it cannot write a file
_OF_THE_DISK = re.compile(r"(?i)no space left|disk is full|quota exceeded|PytorchStreamWriter|unexpected pos")
_BEHIND = 20  # most lines after an exception that ended the process; with more, the process went on after it
_ROOM = 1 << 14  # bytes; a log that has less has lost the end of a traceback
_MOST = 1 << 20  # bytes that are read from the end of a log


def last_words(log: Path, start: int = 0) -> str:
    """Returns our own error, or the exception of the last traceback, or else the last line; empty without output.

    Lines after an error, such as a library's warnings at the end of the process, are ignored. A log on a full disk may
    have lost its end: unless it has a whole exception with another reason, the result is that the disk is full.

    Args:
        start: offset in the log, in bytes, at which the process's output begins.
    """
    lines = [line for line in _lines(log, start) if line.strip()]
    own = [line for line in lines if line.startswith(_OURS)]
    if own:
        return own[-1].removeprefix(_OURS)
    exception = _exception(lines)
    says_why = exception and not _OF_THE_DISK.search(exception) and not (exception == lines[-1] and _is_cut(log))
    if _is_full(log.parent) and not says_why:
        return f"the disk of {log} is full: make room there"
    return exception or (lines[-1] if lines else "")


def traceback(log: Path) -> list[str]:
    """Returns the lines of the last traceback; none if there is no traceback, or if an error of ours says more."""
    lines = _lines(log, 0)
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not begins or any(line.startswith(_OURS) for line in lines):
        return []
    return lines[begins[-1] :]


def same_mistake(before: str, now: str) -> bool:
    """Whether a worker has ended twice with the same last words, apart from times in them."""
    return bool(now) and _TIME.sub("", before) == _TIME.sub("", now)


def _is_full(directory: Path) -> bool:
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail * found.f_frsize < _ROOM  # no blocks: a disk that does not count them


def _is_cut(log: Path) -> bool:
    with log.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _exception(lines: list[str]) -> str:
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    behind = iter(lines[begins[-1] + 1 :] if begins else [])
    found = next((line for line in behind if not line.startswith((" ", "\t"))), "")
    return found if len(list(behind)) <= _BEHIND else ""


def _lines(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _MOST))
            lines = [_RANK.sub("", line) for line in file.read().decode(errors="replace").splitlines()]
    except OSError:  # no log, or one that cannot be read now
        return []
    return list(_without_ignored(lines))


def _without_ignored(lines: Iterable[str]) -> Iterator[str]:
    ignored = False
    for line in lines:
        if line.startswith(_IGNORED):
            ignored = True
        elif not ignored:
            yield line
        elif _TRACEBACK not in line and not line.startswith((" ", "\t")):
            ignored = False  # this line is the exception
