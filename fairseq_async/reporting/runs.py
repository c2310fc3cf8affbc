"""Runs as their directories tell of them: real ones and simulated ones in the same terms."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fairseq_async.errors import ConfigurationError

Event = dict[str, Any]
COMPUTING, WAITING, AWAY = "computing", "waiting", "not training"
_GONE = 3.0  # times its usual round: a worker of which nothing was heard for longer was not there


@dataclass(frozen=True)
class Stretch:
    """What a worker did from one second of the run to another."""

    worker: int
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: to call it by, in a legend.
        group: the cluster of a simulated one; runs of one group are drawn together.
        events: in the order of their settlement; ``time`` in seconds since the beginning.
        curve: evaluations (``time``, ``updates``, ``tokens``, ``loss``) of a simulation; else empty.
        description: ``run.json``.
    """

    name: str
    group: str
    path: Path
    events: list[Event]
    curve: list[dict[str, float]]
    description: dict[str, Any]

    @cached_property
    def applied(self) -> list[Event]:
        return [event for event in self.events if event["status"] == "applied"]

    @property
    def workers(self) -> int:
        return max(int(self.description["workers"] or 0), 1 + max(event["worker"] for event in self.events))

    @property
    def measured(self) -> str:
        """What :meth:`losses` are."""
        return "validation loss" if self.curve else "training loss"

    def losses(self, by: str) -> tuple[list[float], list[float]]:
        """Loss by ``updates``, ``tokens`` or ``time``: as it was evaluated, or a running mean of what workers said."""
        if self.curve:
            rows = [row for row in self.curve if row["loss"] is not None]
            return [row[by] for row in rows], [row["loss"] for row in rows]
        at = {"updates": [float(e["version_after"]) for e in self.applied], "time": [e["time"] for e in self.applied]}
        at["tokens"] = list(accumulate(map(tokens_of, self.applied)))
        known = [(x, e["loss"]) for x, e in zip(at[by], self.applied, strict=True) if e.get("loss") is not None]
        width = max(1, len(known) // 50)
        means = [fmean(loss for _, loss in known[max(0, i - width + 1) : i + 1]) for i in range(len(known))]
        return [x for x, _ in known], means

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Every worker's time."""
        barrier = bool(self.description["method"]["barrier"])
        own = [[event for event in self.events if event["worker"] == w] for w in range(self.workers)]
        return [stretch for events in own for stretch in _stretches(events, barrier)]

    def shares(self, worker: int) -> dict[str, float]:
        """What part of its time the worker did what."""
        own = {what: 0.0 for what in (COMPUTING, WAITING, AWAY)}
        for stretch in self.stretches:
            if stretch.worker == worker:
                own[stretch.what] += stretch.end - stretch.begin
        whole = sum(own.values())
        return {what: seconds / whole if whole else 0.0 for what, seconds in own.items()}


def tokens_of(event: Event) -> float:
    """Target tokens of an update, whose weight may be another number."""
    return float(event.get("tokens") or event["weight"])


def _stretches(events: Sequence[Event], barrier: bool) -> Iterator[Stretch]:
    """Between two settlements a worker computes, then waits for its answer; for what both do not explain it was dead,
    or validated.

    How long it waited after one update it says with the next; after the last one, for as long as the barrier did.
    """
    waits = [*map(_waited, events[1:]), math.inf if barrier else 0.0][: len(events)]
    gaps = [b["time"] - a["time"] for a, b in zip(events, events[1:], strict=False)]
    usual = median(gaps) if gaps else 0.0
    before = 0.0
    for event, waited in zip(events, waits, strict=True):
        gap = event["time"] - before
        hold = max(0.0, min(waited, gap - event.get("computing_seconds", 0.0)))
        computing = event.get("computing_seconds", min(gap - hold, _GONE * usual or gap))
        begin = max(before, event["time"] - hold - computing)
        if begin > before:
            lost = begin - before > max(0.5 * usual, 1e-9) and bool(usual)
            yield Stretch(event["worker"], AWAY if lost else WAITING, before, begin)
        yield Stretch(event["worker"], COMPUTING, begin, event["time"] - hold)
        if hold > 0:
            yield Stretch(event["worker"], WAITING, event["time"] - hold, event["time"])
        before = event["time"]


def _waited(event: Event) -> float:
    if "waiting_seconds" in event:
        return float(event["waiting_seconds"])
    return float(event.get("push_seconds") or 0.0) + float(event.get("pull_seconds") or 0.0)


def load(paths: Sequence[Path]) -> list[Run]:
    """The runs in these directories: of each the run itself, or the trials of a simulation.

    Raises:
        ConfigurationError: there is none in one of them, or it cannot be read.
    """
    runs = []
    for path in paths:
        found = [path] if (path / "run.json").exists() else [each.parent for each in path.glob("**/run.json")]
        if not found:
            raise ConfigurationError(f"{path}: no run and no simulation there (no run.json)")
        read = [run for directory in sorted(found) if (run := _read(directory, path)) is not None]
        runs += sorted(read, key=lambda run: run.description.get("simulated", {}).get("number", 0))
    if not runs:
        raise ConfigurationError(f"{', '.join(map(str, paths))}: no update was settled there yet")
    return runs


def _read(directory: Path, given: Path) -> Run | None:
    try:
        description = json.loads((directory / "run.json").read_text())
        events, curve = _lines(directory / "events.jsonl"), _lines(directory / "curve.jsonl")
        if not events:
            return None
        names = description.get("simulated", {})
        first = 0.0 if names else min(e["time"] - e.get("computing_seconds", 0.0) for e in events)
        shifted = [event | {"time": event["time"] - first} for event in events]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{directory}: the run there cannot be read: {error!r}") from error
    name = names.get("name") or given.resolve().name
    return Run(name, names.get("cluster", ""), directory, shifted, curve, description)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
