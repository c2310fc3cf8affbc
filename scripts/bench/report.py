"""The output of every benchmark: the machine, both sides of one run, and whether the bounds hold."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).resolve().parents[2]
_LARGEST_LOSS = 700.0  # above it, e to the loss is no number of Python's


@dataclass(frozen=True)
class Bound:
    """A limit that a measured value must keep: from above, or with `at_least` from below."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value keeps the limit; NaN never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        return f"{self.what}: {self.value:.3g} ({sign} {self.limit:.3g}: {'holds' if self.holds else 'BROKEN'})"


def machine() -> dict[str, Any]:
    """Describe the machine, on which figures depend; the load is the number of processes running in the last minute."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def processor() -> str:
    """Return the processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class Report:
    """Collects tables and bounds while a benchmark runs.

    Make it at the start of the benchmark, because it records the load of the machine before.
    """

    def __init__(self, title: str) -> None:
        self.title, self.machine = title, machine()
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.bounds: list[Bound] = []
        print(f"{title}\n{', '.join(f'{name} {value}' for name, value in self.machine.items())}", flush=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print rows as a table; all rows have the same keys."""
        self.tables[name] = [dict(row) for row in rows]
        table = Table(title=name, title_justify="left")
        for key, value in rows[0].items():
            table.add_column(key, justify="left" if isinstance(value, str) else "right")
        for row in rows:
            table.add_row(*map(cell, row.values()))
        Console(width=None if sys.stdout.isatty() else 200).print(table)

    def bound(self, what: str, value: float, limit: float, at_least: bool = False) -> None:
        """Print a value beside its limit, and record both."""
        self.bounds.append(Bound(what, value, limit, at_least))
        print(self.bounds[-1], flush=True)

    def write(self, path: Path | None) -> None:
        """Write everything so far to `path`, if given: a benchmark may be ended before its end."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    def end(self, path: Path | None) -> None:
        """Write everything to `path`, if given; end the program with code 1 if a bound is broken."""
        self.write(path)
        if not all(bound.holds for bound in self.bounds):
            raise SystemExit(1)

    def to_json(self) -> dict[str, Any]:
        """Return what is printed, unrounded, with command and time; null for numbers that are NaN or infinite."""
        program = Path(sys.argv[0]).resolve()
        if program.is_relative_to(_ROOT):
            program = program.relative_to(_ROOT)
        return {
            "title": self.title,
            "command": shlex.join(["python", str(program), *sys.argv[1:]]),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": self.machine,
            "tables": _finite(self.tables),
            "bounds": _finite([vars(bound) | {"holds": bound.holds} for bound in self.bounds]),
        }


def _finite(value: Any) -> Any:
    """Returns the value with None for NaN and infinity, which JSON does not have."""
    match value:
        case dict():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
        case float() if not math.isfinite(value):
            return None
    return value


def perplexity(loss: float) -> float:
    """Returns e to the loss; infinite for a run that diverged, whether its loss is NaN or large."""
    return math.exp(loss) if loss <= _LARGEST_LOSS else math.inf


def cell(value: Any) -> str:
    """Format a value for a table: a float with four or more digits, thousands separated."""
    if not isinstance(value, float):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
