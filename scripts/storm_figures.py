"""Computes the cost of many faults (a *storm*) from the logs of such a run and of one without faults (*calm*)."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

_AFTER = 10.0  # seconds after a worker's death in which its survivors are watched
_LAST = 0.15  # last share of the work, over which the final loss is taken
_AWAY = ("pause", "partition")  # faults during which the worker cannot work


@dataclass(frozen=True)
class Push:
    """One applied update.

    Attributes:
        kept: whether no restart of the server rolled it back.
        waited: seconds for which its worker waited for others before it computed the update, in local SGD.
    """

    time: float
    worker: int
    weight: float
    version: int
    loss: float | None
    kept: bool
    waited: float = 0.0


class Log:
    """A run's updates in the order of time, its faults and its rollbacks."""

    def __init__(self, run_dir: Path) -> None:
        timeline = json.loads((run_dir / "timeline.json").read_text())
        self.begin = next(m["time"] for m in timeline if m["what"] == "begin")
        self.end = next(m["time"] for m in timeline if m["what"] == "end")
        self.moments = [m for m in timeline if self.begin <= m["time"] <= self.end]
        self.faults = [m for m in self.moments if m["what"] == "fault"]
        files = (("events.jsonl", True), ("events.rolled-back.jsonl", False))
        pushes = [push for name, kept in files for push in _pushes(run_dir / name, kept)]
        self.all = sorted(pushes, key=lambda push: push.time)
        self.inside = [push for push in self.all if self.begin <= push.time <= self.end]
        self.rollbacks = [r["time"] for r in _lines(run_dir / "rollbacks.jsonl") if self.begin <= r["time"] <= self.end]
        self.workers = sorted({push.worker for push in self.all})

    def of(self, worker: int) -> list[Push]:
        return [push for push in self.inside if push.worker == worker]

    def kills(self, worker: int | None) -> list[float]:
        """Returns the times at which this worker, or for None the server, was killed."""
        return [m["time"] for m in self.faults if m["kind"] == "kill" and m["worker"] == worker]


def figures(quiet: Log, wild: Log) -> dict[str, str]:
    """Returns the figures to print, of a run without faults (``quiet``) and one with faults (``wild``)."""
    hours = (wild.end - wild.begin) / 3600
    work = common_work(quiet, wild)
    losses = [final_loss(log, work) for log in (quiet, wild)]
    kept = sum(push.kept for push in wild.inside)
    return {
        "faults": f"{len(wild.faults)} in {60 * hours:.1f} minutes: {len(wild.faults) / hours:.0f} an hour",
        "updates kept": f"{kept} (calm: {len(quiet.inside)}); taken back: {len(wild.inside) - kept}",
        "useful work": f"{100 * useful_share(wild):.1f}% of what the live workers could have done",
        "final loss": f"{losses[1]:.4f} (calm: {losses[0]:.4f}, {100 * (loss_ratio(quiet, wild) - 1):+.2f}%) "
        f"after {work:,.0f} tokens or local steps",
        "longest gap between survivors' steps after a kill": f"{_range(gaps_after_kills(wild))} "
        f"(calm, any {_AFTER:.0f} s: {_range(gaps_in_windows(quiet))})",
        "the same without the waits of a grace period": f"{_range(gaps_after_kills(wild, waits=False))} "
        f"(calm: {_range(gaps_in_windows(quiet, waits=False))})",
        "server's restart to the next applied update": _range(waits(wild, wild.rollbacks)),
        "server's death to the next applied update": _range(waits(wild, wild.kills(None))),
        "a worker's start to its first update": _range(entrances(wild)),
    }


def useful_share(log: Log) -> float:
    """Returns the share of useful work: tokens (or local steps) kept, over the number that was possible.

    Possible is what all workers could have done while they were in the run, each at its speed without faults.
    """
    kept = possible = 0.0
    for worker in log.workers:
        pushes = log.of(worker)
        troubles = [m["time"] for m in log.moments if m["worker"] in (worker, None) and m["what"] != "begin"]
        troubles += log.rollbacks
        calm = [(b.time - a.time, b.weight) for a, b in pairwise(pushes) if not _within(troubles, a.time, b.time)]
        rate = sum(weight for _, weight in calm) / sum(seconds for seconds, _ in calm)
        possible += rate * live_seconds(log, worker)
        kept += sum(push.weight for push in pushes if push.kept)
    return kept / possible


def live_seconds(log: Log, worker: int) -> float:
    """Returns a worker's seconds up to its last update, without its absences.

    So an unfinished update at the end counts neither as kept nor as lost.
    """
    last = log.of(worker)[-1].time
    return last - log.begin - _union([(begin, min(end, last)) for begin, end in absences(log, worker) if begin < last])


def absences(log: Log, worker: int) -> list[tuple[float, float]]:
    """Returns the intervals from a worker's death to its next update, and those of its pauses and partitions."""
    times = [push.time for push in log.of(worker)]
    away = []
    for moment in log.moments:
        if moment["worker"] != worker:
            continue
        if moment["what"] == "death":
            starts = (m["time"] for m in log.moments if m["what"] == "start" and m["worker"] == worker)
            start = next((time for time in starts if time >= moment["time"]), log.end)
            away.append((moment["time"], _next(times, start, log.end)))
        elif moment["what"] == "fault" and moment["kind"] in _AWAY:
            away.append((moment["time"], min(log.end, moment["time"] + moment["seconds"])))
    return away


def common_work(quiet: Log, wild: Log) -> float:
    """Returns the number of tokens (or local steps) that both runs have kept.

    Versions cannot be compared: while a worker is away, a step has fewer gradients.
    """
    return min(sum(push.weight for push in log.all if push.kept) for log in (quiet, wild))


def loss_ratio(quiet: Log, wild: Log) -> float:
    """Returns the ratio of the final losses after the same amount of work; above 1, the run with faults is worse."""
    work = common_work(quiet, wild)
    return final_loss(wild, work) / final_loss(quiet, work)


def final_loss(log: Log, work: float) -> float:
    """Returns the mean training loss per token over the last updates before ``work`` tokens (or steps) were kept."""
    kept = [push for push in log.all if push.kept]
    done = accumulate(push.weight for push in kept)
    last = [p for p, d in zip(kept, done, strict=True) if p.loss is not None and (1 - _LAST) * work <= d <= work]
    return sum(p.weight * p.loss for p in last if p.loss is not None) / sum(p.weight for p in last)


def gaps_after_kills(log: Log, waits: bool = True) -> list[float]:
    """Returns the longest gap between updates of each survivor of a kill that no other fault or rollback was near.

    Args:
        waits: whether to include the time for which a survivor waited for others, such as the restarted worker.
    """
    found = []
    for worker in log.workers:
        for killed_at in log.kills(worker):
            others = [m["time"] for m in log.faults if m["time"] != killed_at]
            if _within([*others, *log.rollbacks], killed_at - _AFTER, killed_at + _AFTER):
                continue
            there = [w for w in log.workers if w != worker and not _is_away(log, w, killed_at)]
            found += [_longest_gap(log.of(other), killed_at, waits) for other in there]
    return found


def _is_away(log: Log, worker: int, moment: float) -> bool:
    return any(begin - _AFTER <= moment <= end for begin, end in absences(log, worker))


def gaps_in_windows(log: Log, waits: bool = True) -> list[float]:
    """Returns the longest gap of each worker in each window of ``_AFTER`` seconds, for comparison."""
    count = int((log.end - log.begin) / _AFTER)
    starts = [log.begin + _AFTER * n for n in range(count)]
    return [_longest_gap(log.of(worker), start, waits) for worker in log.workers for start in starts]


def _longest_gap(pushes: Sequence[Push], start: float, waits: bool) -> float:
    """Returns the longest time between two updates in the window; without waits, if ``waits`` is false.

    A worker reports its wait for an answer with its next update.
    """
    times = [push.time for push in pushes]
    waited = [0.0 if waits else push.waited for push in pushes[1:]] + [0.0]
    ends = [time - seconds for time, seconds in zip(times, waited, strict=True)]
    first, last = max(0, bisect_right(times, start) - 1), bisect_left(times, start + _AFTER) + 1
    return max((b - a for a, b in zip(times[first:], ends[first + 1 : last], strict=False)), default=_AFTER)


def waits(log: Log, moments: Sequence[float]) -> list[float]:
    """Returns the seconds from each moment to the next applied update."""
    times = [push.time for push in log.inside]
    return [_next(times, moment, log.end) - moment for moment in moments]


def entrances(log: Log) -> list[float]:
    """Returns the seconds from a worker process's start to its first update, of each process that made one."""
    found = []
    for start in log.moments:
        if start["what"] != "start":
            continue
        ends = (m["time"] for m in log.moments if m["what"] == "death" and m["worker"] == start["worker"])
        end = next((time for time in ends if time > start["time"]), log.end)
        first = _next([push.time for push in log.of(start["worker"])], start["time"], log.end)
        if first < end:
            found.append(first - start["time"])
    return found


def _next(times: Sequence[float], moment: float, otherwise: float) -> float:
    place = bisect_right(times, moment)
    return times[place] if place < len(times) else otherwise


def _within(moments: Sequence[float], begin: float, end: float) -> bool:
    return any(begin <= moment <= end for moment in moments)


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _range(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return f"median {median(seconds):.2f} s, longest {max(seconds):.2f} s of {len(seconds)}"


def _pushes(path: Path, kept: bool) -> Iterator[Push]:
    for line in _lines(path):
        if line["status"] == "applied":
            waited = line.get("waiting_seconds", 0.0)
            version, loss = line["version_after"], line.get("loss")
            yield Push(line["time"], line["worker"], line["weight"], version, loss, kept, waited)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a file of JSON lines."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            yield json.loads(line)
