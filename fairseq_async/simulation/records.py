"""The files of a trial: those of a real run, with virtual seconds, and the results of evaluations."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fairseq_async.method.spec import JsonObject
from fairseq_async.protocol import Receipt, Report, Status
from fairseq_async.records.description import SUMMARY
from fairseq_async.records.event_log import EVENTS, EventLog
from fairseq_async.records.events import read_events
from fairseq_async.records.recording import checksum
from fairseq_async.simulation.simulated_run import SimulatedRun


class Records:
    """The files in one trial's directory.

    ``events.jsonl`` and ``run.json`` are those that a real run leaves; ``curve.jsonl`` has a line for each evaluation;
    ``summary.json`` is there when the trial is over, ``state.pt`` while it is not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.curve: list[dict[str, float]] = []
        self._events: EventLog | None = None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results of a trial that is over; None before that."""
        path = self.directory / SUMMARY
        return json.loads(path.read_text()) if path.exists() else None

    def open(self, trial: SimulatedRun, **names: Any) -> None:
        """Begins a trial, or goes on from the state on disk; ``names`` say in ``run.json`` which trial it is."""
        state = self.directory / "state.pt"
        if state.exists():
            trial.load_state_dict(torch.load(state, map_location=trial.parameters.device, weights_only=True))
            self.curve = [row for row in read_lines(self.directory / "curve.jsonl") if row["steps"] <= trial.steps]
        else:
            (self.directory / EVENTS).unlink(missing_ok=True)  # of a trial that was killed before it was saved
        self._events = EventLog(self.directory, trial.sequences, "state.pt", trial.now)
        described = {"workers": trial.spec.workers, "method": trial.spec.to_json(), "simulated": names}
        write_whole(self.directory / "run.json", described | {"layout": trial.model.layout.to_json()})
        self._write_curve()

    def write(self, time: float, receipt: Receipt, report: Report, extra: JsonObject) -> None:
        assert self._events is not None
        self._events.write(time, receipt, report, extra)

    def evaluate(self, trial: SimulatedRun) -> None:
        row = {
            "time": trial.now,
            "updates": trial.version,
            "steps": trial.steps,
            "tokens": trial.tokens,
            "loss": trial.evaluate(),
        }
        self.curve.append(row)
        self._write_curve()

    def save(self, trial: SimulatedRun) -> None:
        """Saves the whole state, from which the trial can go on."""
        partial = self.directory / "state.partial"
        torch.save(trial.state_dict(), partial)
        partial.replace(self.directory / "state.pt")

    def end(self, trial: SimulatedRun, names: dict[str, str], real_seconds: float) -> dict[str, Any]:
        events = read_events(self.directory / EVENTS)
        staleness = [event.staleness for event in events if event.status is Status.APPLIED]
        summary: dict[str, Any] = names | _finite(self.curve[-1])
        summary |= {
            "staleness": fmean(staleness or [0]),
            "largest_staleness": max(staleness, default=0),
            "remark": _remark(trial),
            "real_seconds": real_seconds,
            "checksum": checksum(trial.parameters),
        }
        write_whole(self.directory / SUMMARY, summary)
        (self.directory / "state.pt").unlink(missing_ok=True)
        return summary

    def _write_curve(self) -> None:
        text = "".join(json.dumps(_finite(row)) + "\n" for row in self.curve)
        (self.directory / "curve.jsonl").write_text(text)


def _remark(trial: SimulatedRun) -> str:
    if trial.diverged:
        return "diverged"
    return "" if trial.finished else "stopped: all wait for a worker that does not come back"


def _finite(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replaces NaN and infinity, which JSON does not have, by None; a row that was read may have None already."""
    return {key: value if value is not None and math.isfinite(value) else None for key, value in row.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the whole lines of a .jsonl file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write_whole(path: Path, content: Any) -> None:
    """Writes a JSON file under another name and renames it, so that a reader never sees a part of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def first_time(curve: Sequence[dict[str, float]], loss: float) -> float | None:
    """Returns the time of the first evaluation with at most this loss; None where there is none."""
    return next((row["time"] for row in curve if row["loss"] is not None and row["loss"] <= loss), None)
