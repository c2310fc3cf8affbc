"""``events.jsonl``: one line for every update that was settled."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_async.server.parameter_server import Receipt

EVENTS, ROLLED_BACK, ROLLBACKS = "events.jsonl", "events.rolled-back.jsonl", "rollbacks.jsonl"


class EventLog:
    """Appends whole lines, so that a reader may follow the file while the run goes on.

    Args:
        run_dir: where the file is.
        sequences: the last settled update of each worker. Events after these are taken back by a restart, or belong to
            another run: they go to ``events.rolled-back.jsonl``, and ``rollbacks.jsonl`` says how many, when and why;
            none, where only an update was lost that was acknowledged and not written yet.
        source: the state from which the run goes on.
        time: seconds since 1970.
    """

    def __init__(self, run_dir: Path, sequences: Mapping[int, int], source: str, time: float) -> None:
        self._full = False
        path = run_dir / EVENTS
        if path.exists():
            _take_back(path, {"time": time, "source": source, "sequences": dict(sequences)})
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, time: float, receipt: Receipt, report: dict[str, Any]) -> None:
        """``time`` in seconds since 1970; ``report`` is what the worker says of itself.

        On a full disk the run goes on without the line.
        """
        own = {
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
        event = own | report | own  # a report does not change what the server knows
        line = json.dumps({key: _finite(value) for key, value in event.items()}).encode() + b"\n"
        try:
            size = os.fstat(self._file).st_size
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, size)  # readers see whole lines only
                raise OSError("the disk is full")
            self._full = False
        except OSError as error:
            if not self._full:
                print(f"events are not recorded: {error}; the run goes on", file=sys.stderr, flush=True)
            self._full = True


def _take_back(path: Path, rollback: dict[str, Any]) -> None:
    """Moves the events; a death before the last line here leaves it all to the next restart."""
    rolled_back, rollbacks = path.with_name(ROLLED_BACK), path.with_name(ROLLBACKS)
    lines = _whole_lines(path)
    covered = [_covered(json.loads(line), rollback["sequences"]) for line in lines]
    taken_back = [line for line, kept in zip(lines, covered, strict=True) if not kept]
    recorded = [*_whole_lines(rollbacks), json.dumps(rollback | {"events": len(taken_back)}) + "\n"]
    before = sum(json.loads(line)["events"] for line in recorded[:-1])
    _write_whole(rolled_back, _whole_lines(rolled_back)[:before] + taken_back)
    _write_whole(rollbacks, recorded)
    _write_whole(path, [line for line, kept in zip(lines, covered, strict=True) if kept])


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _write_whole(path: Path, lines: list[str]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text("".join(lines))
    part.replace(path)


def _covered(event: dict[str, Any], sequences: Mapping[int, int]) -> bool:
    return int(event["sequence"]) <= sequences.get(event["worker"], -1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
