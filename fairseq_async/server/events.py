"""``events.jsonl``: one line for every update that was settled."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_async.server.parameter_server import Receipt


class EventLog:
    """Appends to the file, whole lines only, so that a reader may follow it while the run goes on.

    Args:
        sequences: the last settled update of each worker. Events after these belong to what a restart takes back, or
            to another run: they are left in ``events.jsonl.old``, and this log goes on as if they had not been.
    """

    def __init__(self, path: Path, sequences: Mapping[int, int]) -> None:
        if path.exists():
            _take_back(path, sequences)
        self._file = path.open("a", buffering=1)

    def write(self, time: float, receipt: Receipt, report: dict[str, Any]) -> None:
        """``time`` in seconds since 1970; ``report`` is what the worker says of itself."""
        event = {
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
            **report,
        }
        self._file.write(json.dumps({key: _finite(value) for key, value in event.items()}) + "\n")


def _take_back(path: Path, sequences: Mapping[int, int]) -> None:
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in lines if _covered(json.loads(line), sequences)]
    if len(kept) < len(lines):
        path.replace(path.with_name(path.name + ".old"))
        path.write_text("".join(kept))


def _covered(event: dict[str, Any], sequences: Mapping[int, int]) -> bool:
    return int(event["sequence"]) <= sequences.get(event["worker"], -1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
