"""What a benchmark writes with ``--json`` is JSON that other programs can read."""

import json
import math
from pathlib import Path

import pytest

from scripts.bench.report import Report


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    report = Report("a run that diverged")
    report.table("losses", [{"method": "SGD", "loss": math.inf, "standard error": math.nan, "seeds": 1}])
    report.bound("loss", math.nan, 2.0)
    with pytest.raises(SystemExit):
        report.end(tmp_path / "report.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert written["tables"]["losses"] == [{"method": "SGD", "loss": None, "standard error": None, "seeds": 1}]
    (bound,) = written["bounds"]
    assert bound["value"] is None and not bound["holds"]
