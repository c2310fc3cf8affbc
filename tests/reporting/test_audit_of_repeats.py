"""``fairseq-async audit`` finds an update that is in the log twice, wherever the second line is."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.reporting.audit import AuditError, audit


def applied(worker: int, sequence: int, version: int) -> dict[str, Any]:
    """The line of an update that took the server from ``version`` to the next."""
    numbers = {"worker": worker, "sequence": sequence, "base_version": version, "version_after": version + 1}
    return numbers | {"time": 1.0, "staleness": 0, "weight": 1.0, "status": "applied"}


def write(run_dir: Path, lines: list[dict[str, Any]]) -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("sequence", [0, 1])
def test_the_same_sequence_number_twice_in_a_row_counts_twice(tmp_path: Path, sequence: int) -> None:
    lines = [applied(0, number, number) for number in range(sequence + 1)]
    write(tmp_path, lines)
    assert audit(tmp_path).applied == sequence + 1
    write(tmp_path, [*lines, applied(0, sequence, sequence + 1)])
    with pytest.raises(AuditError, match=f"worker 0's update {sequence} comes after .* it counts twice"):
        audit(tmp_path)


def test_the_lines_of_another_worker_do_not_hide_a_repetition(tmp_path: Path) -> None:
    write(tmp_path, [applied(0, 0, 0), applied(1, 0, 1), applied(1, 1, 2), applied(0, 0, 3)])
    with pytest.raises(AuditError, match="line 4: worker 0's update 0 .* it counts twice"):
        audit(tmp_path)
