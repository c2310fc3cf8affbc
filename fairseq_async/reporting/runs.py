"""Runs and simulated trials, read from their directories into one form."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pydantic import TypeAdapter

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.progress.compressed import Compressed, read_sizes
from fairseq_async.launch.progress.earlier_launches import Pauses
from fairseq_async.protocol.receipt import Status
from fairseq_async.records.description import RunDescription, SimulatedTrial
from fairseq_async.records.event_log import EVENTS
from fairseq_async.records.events import Event, LineReader, read_events
from fairseq_async.records.validations import VALIDATIONS, Validation, not_taken_back, parse_validation
from fairseq_async.reporting import GIVE_A_RUN

COMPUTING, WAITING, AWAY = "computing", "waiting", "not training"
Axis = Literal["updates", "tokens", "time"]
_GONE = 3.0  # times its usual cycle: a worker without an update for longer was not there


@dataclass(frozen=True)
class Evaluation:
    """One line of a simulation's ``curve.jsonl``: the server's parameters evaluated on the validation data."""

    time: float
    updates: int
    tokens: float
    loss: float | None


_EVALUATION = TypeAdapter(Evaluation)


@dataclass(frozen=True)
class Activity:
    """What a worker did for some time.

    Attributes:
        kind: :data:`COMPUTING`, :data:`WAITING` or :data:`AWAY`.
        begin: seconds since the run's beginning.
    """

    worker: int
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class LoadedRun:
    """One run, or one trial of a simulation.

    Attributes:
        name: the run's name in legends.
        group: the cluster of a simulated trial; runs of one group are drawn together.
        number: the trial's place in its experiment.
        started_workers: number of workers with which the run was started.
        barrier: whether workers wait for each other.
        events: in the order in which they were settled; ``time`` in seconds since the run's beginning, without those
            between an interruption and the resumption.
        curve: the evaluations of a simulation; else empty.
        validations: those of worker 0 of a real run, where its front end writes them.
        sizes: numbers of values of its updates in turn, one per fragment; None where ``run.json`` does not say them.
        regions: whether the events are of several servers, each of which counts its own versions.
        unit: what the weights of updates count, as in :attr:`RunDescription.unit`.
    """

    name: str
    group: str
    number: int
    started_workers: int
    barrier: bool
    events: list[Event]
    curve: list[Evaluation]
    validations: list[Validation] = field(default_factory=list)
    sizes: Sequence[int] | None = None
    regions: bool = False
    unit: str = "tokens"

    @cached_property
    def applied(self) -> list[Event]:
        """The events of applied updates."""
        return [event for event in self.events if event.status is Status.APPLIED]

    @cached_property
    def step_sizes(self) -> list[int]:
        """The number of updates in each step of the server; empty where there are several servers."""
        sizes, size = list[int](), 0
        if self.regions:
            return sizes
        version = self.applied[0].base_version if self.applied else 0
        for event in self.applied:
            size += 1
            version += sum(merge > version for merge in event.merged)  # versions that no step has made
            if event.version_after > version:
                sizes.append(size)
                version, size = event.version_after, 0
        return sizes

    @property
    def steps(self) -> int:
        """The number of steps of the server, or of the global server above those of regions."""
        if self.regions:
            return self.curve[-1].updates if self.curve else 0
        merges = sum(len(event.merged) for event in self.events)
        return max(event.version_after for event in self.events) - merges

    @property
    def workers(self) -> int:
        """The number of workers, including those that joined later."""
        return max(self.started_workers, 1 + max(event.worker for event in self.events))

    @property
    def measured(self) -> str:
        """What kind of loss :meth:`losses` has."""
        return "validation loss" if self.curve else "training loss"

    def losses(self, by: Axis) -> tuple[list[float], list[float]]:
        """The loss curve: from evaluations where there are any, else a running mean of the workers' training losses.

        Returns:
            values on the axis, and losses.
        """
        if self.curve:
            rows = [(float(getattr(row, by)), row.loss) for row in self.curve if row.loss is not None]
            return [x for x, _ in rows], [loss for _, loss in rows]
        known = [(x, e.loss) for x, e in zip(self._axis(by), self.applied, strict=True) if e.loss is not None]
        return [x for x, _ in known], running_mean([loss for _, loss in known])

    def _axis(self, by: Axis) -> list[float]:
        """Returns the place of each applied update on the axis."""
        match by:
            case "updates":
                return [float(event.version_after) for event in self.applied]
            case "time":
                return [event.time for event in self.applied]
        return list(accumulate(event.target_tokens for event in self.applied))

    @cached_property
    def activities(self) -> list[Activity]:
        """How every worker spent its time."""
        own = [[event for event in self.events if event.worker == w] for w in range(self.workers)]
        return [activity for events in own for activity in _activities(events, self.barrier)]

    def compressed(self, worker: int | None = None) -> Compressed | None:
        """Summarises the compressed updates of a worker, or of all workers; None if updates are not compressed."""
        own = [event for event in self.events if worker is None or event.worker == worker]
        return Compressed.of(own, self.sizes)

    def shares(self, worker: int) -> dict[str, float]:
        """Returns the fraction of its time that the worker spent on each kind of activity."""
        own = {kind: 0.0 for kind in (COMPUTING, WAITING, AWAY)}
        for activity in self.activities:
            if activity.worker == worker:
                own[activity.kind] += activity.end - activity.begin
        whole = sum(own.values())
        return {kind: seconds / whole if whole else 0.0 for kind, seconds in own.items()}


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns for each value the mean of it and of values before it, over a fiftieth of all values, at most 1,000."""
    width = min(max(1, len(values) // 50), 1000)
    return [fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _activities(events: Sequence[Event], barrier: bool) -> Iterator[Activity]:
    """Yields the activities of one worker, from its events.

    Between two events a worker computes, then waits for its answer. In time that neither explains, the worker was away:
    dead, or validating. How long it waited after an update is reported with the next update. After the last update that
    is unknown, and taken as all the time left with a barrier, else as none.
    """
    waits = [*(event.exchange_seconds for event in events[1:]), math.inf if barrier else 0.0][: len(events)]
    gaps = [after.time - before.time for before, after in pairwise(events)]
    usual = median(gaps) if gaps else 0.0
    previous = 0.0
    for event, waited in zip(events, waits, strict=True):
        gap = event.time - previous
        wait = max(0.0, min(waited, gap - (event.computing_seconds or 0.0)))
        computing = event.computing_seconds
        if computing is None:
            computing = min(gap - wait, _GONE * usual or gap)
        begin = max(previous, event.time - wait - computing)
        if begin > previous:
            away = begin - previous > max(0.5 * usual, 1e-9) and bool(usual)
            yield Activity(event.worker, AWAY if away else WAITING, previous, begin)
        yield Activity(event.worker, COMPUTING, begin, event.time - wait)
        if wait > 0:
            yield Activity(event.worker, WAITING, event.time - wait, event.time)
        previous = event.time


def name_of(directory: Path) -> str:
    """Returns the name of a directory as text; file names may have bytes that are none, which no page can show."""
    return directory.resolve().name.encode(errors="replace").decode()


def load(paths: Sequence[Path]) -> list[LoadedRun]:
    """Reads the runs in these directories: from each the run itself, or the trials of a simulation.

    Raises:
        ConfigurationError: a directory has no run, a run cannot be read, or no run has an update yet.
    """
    runs = []
    for path in paths:
        found = [path] if (path / "run.json").exists() else [each.parent for each in path.glob("**/run.json")]
        if not found:
            raise ConfigurationError(f"{path}: no run and no simulation there (no run.json); {GIVE_A_RUN}")
        named = {each: name_of(each if len(found) > 1 else path) for each in sorted(found)}
        read = [run for directory, name in named.items() if (run := _read(directory, name)) is not None]
        runs += sorted(read, key=lambda run: run.number)
    if not runs:
        raise ConfigurationError(
            f"{', '.join(map(str, paths))}: no update was settled there yet; wait for the first one"
        )
    return runs


def _since_the_beginning(directory: Path, events: Sequence[Event]) -> Iterator[Event]:
    """Yields the events of a real run with the seconds for which it had run until then."""
    began = min(event.time - (event.computing_seconds or 0.0) for event in events)
    pauses, paused, newest = Pauses(directory), 0.0, events[0].time
    for event in events:
        paused += pauses.before(event, newest)
        newest = max(newest, event.time)
        yield replace(event, time=event.time - began - paused)


def _read(directory: Path, name: str) -> LoadedRun | None:
    """Reads one run, which has this name if it is no trial of a simulation; returns None while it has no event."""
    description = RunDescription.read(directory)
    try:
        events = read_events(directory / EVENTS)
        curve = list(LineReader(directory / "curve.jsonl", _EVALUATION.validate_json))
        validations = not_taken_back(list(LineReader(directory / VALIDATIONS, parse_validation)))
        if not events:
            return None
        trial = description.simulated or SimulatedTrial()
        if description.simulated is None:
            events = list(_since_the_beginning(directory, events))
        return LoadedRun(
            name=trial.name or name,
            group=trial.cluster,
            number=trial.number,
            started_workers=description.workers or 0,
            barrier=description.has_barrier,
            events=events,
            curve=curve,
            validations=validations,
            sizes=read_sizes(directory),
            regions=description.has_regions,
            unit=description.unit,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{directory}: the run there cannot be read: {error!r}") from error
