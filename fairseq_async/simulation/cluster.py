"""The simulated machines: seconds per step and per exchange, and when each worker is absent."""

import math
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.validation import first_mistake

if TYPE_CHECKING:
    from fairseq_async.records.events import Event

WIDEST = 3.0  # standard deviation of seconds over their mean


class StrictModel(BaseModel):
    """A section of the experiment file, in which unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Distribution(StrictModel):
    """Seconds per step that are drawn anew for each step.

    Attributes:
        spread: standard deviation over mean; an exponential distribution has 1.
    """

    distribution: Literal["lognormal", "uniform", "exponential"]
    mean: float = Field(gt=0)
    spread: float = Field(0.2, ge=0, le=WIDEST)

    @model_validator(mode="after")
    def _possible(self) -> "Distribution":
        if self.distribution == "exponential" and "spread" in self.model_fields_set:
            raise ValueError("spread of an exponential distribution is 1: leave it out")
        if self.distribution == "uniform" and self.spread > 0.57:
            raise ValueError("spread of a uniform distribution is at most 0.57: no step takes less than no time")
        return self

    def draw(self, random_: random.Random) -> float:
        """Draws the seconds of one step."""
        match self.distribution:
            case "exponential":
                return random_.expovariate(1 / self.mean)
            case "uniform":
                half = math.sqrt(3) * self.spread
                return self.mean * random_.uniform(1 - half, 1 + half)
        variance = math.log(1 + self.spread**2)
        return self.mean * math.exp(random_.gauss(-variance / 2, math.sqrt(variance)))

    def of_sum(self, count: int) -> "Distribution":
        """Returns the distribution of the sum of so many draws: of its mean and deviation, taken to be log-normal
        (Fenton 1960)."""
        spread = 1.0 if self.distribution == "exponential" else self.spread
        return Distribution(distribution="lognormal", mean=count * self.mean, spread=spread / math.sqrt(count))


class Trace(StrictModel):
    """Recorded seconds per step; after the last one they begin again.

    Attributes:
        trace: a file with one number per line, or the ``events.jsonl`` of a real run.
        worker: the worker whose seconds to take from an ``events.jsonl``.
    """

    trace: Path
    worker: int = Field(0, ge=0)


Seconds = Annotated[float, Field(gt=0)] | Distribution | Trace


def _described(given: Any) -> Any:
    """Returns the distribution or trace of a mapping, and anything else as it is. In a union, a mistake in a
    distribution would be shown as one in a trace."""
    if not isinstance(given, dict):
        return given
    if ("distribution" in given) == ("trace" in given):
        raise ValueError("give a number, or a mapping with either distribution or trace")
    kind: type[Distribution | Trace] = Distribution if "distribution" in given else Trace
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ValueError(first_mistake(error)) from error


class Absence(StrictModel):
    """A time during which a worker is absent.

    Attributes:
        from_: begin in virtual seconds; with 0 the worker joins late.
        to: end in virtual seconds; None if the worker never comes back.
        pause: the worker stops and later goes on where it was; otherwise it dies, loses what it was computing, and
            comes back with a new inner optimizer.
    """

    worker: int = Field(ge=0)
    from_: float = Field(ge=0, alias="from")
    to: float | None = None
    pause: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> "Absence":
        if self.to is not None and self.to <= self.from_:
            raise ValueError(f"to is {self.to:g}; it must be after from, which is {self.from_:g}")
        if self.pause and self.to is None:
            raise ValueError("a pause needs an end: give to")
        return self


class Exchange(StrictModel):
    """The time of an exchange: to send an update or the parameters, and for the server to process an update.

    Attributes:
        seconds: time of each transfer, whatever its size.
        seconds_per_byte: time of each byte in addition, for example 8e-9 for a link of 1 Gbit/s.
        server_seconds: time for which the server is busy with one update, while others queue.
    """

    seconds: float = Field(0.0, ge=0)
    seconds_per_byte: float = Field(0.0, ge=0)
    server_seconds: float = Field(0.0, ge=0)

    def transfer(self, size: int) -> float:
        """Returns the seconds to send ``size`` bytes one way."""
        return self.seconds + self.seconds_per_byte * size


class Cluster(StrictModel):
    """The workers of a simulation, and the time that they and the server take.

    Attributes:
        workers: number of workers.
        seconds_per_step: one entry for all workers, or one for each.
        regions: number of regions, which have equally many consecutive workers. The server, or the global server above
            the regions' servers, is in the first region.
        between_regions: time of an exchange with another region; None for the same time as within a region.
    """

    workers: int = Field(ge=1)
    seconds_per_step: Seconds | list[Seconds] = 1.0
    exchange: Exchange = Exchange()
    absences: list[Absence] = []
    regions: int = Field(1, ge=1)
    between_regions: Exchange | None = None

    @field_validator("seconds_per_step", mode="before")
    @classmethod
    def _of_one_kind(cls, given: Any) -> Any:
        return [_described(each) for each in given] if isinstance(given, list) else _described(given)

    @model_validator(mode="after")
    def _of_one_size(self) -> "Cluster":
        given = self.seconds_per_step
        if isinstance(given, list) and len(given) != self.workers:
            raise ValueError(f"seconds_per_step has {len(given)} entries for {self.workers} workers")
        if self.workers % self.regions:
            raise ValueError(f"regions is {self.regions}: it does not divide the {self.workers} workers")
        if self.between_regions is not None and self.regions == 1:
            raise ValueError("between_regions needs regions: give their number")
        if self.between_regions is not None and self.between_regions.server_seconds:
            raise ValueError("between_regions is the time of a transfer: give server_seconds in exchange")
        for absence in self.absences:
            if absence.worker >= self.workers:
                raise ValueError(f"absences name worker {absence.worker}; there are {self.workers}, counted from 0")
        in_order = sorted(self.absences, key=lambda each: (each.worker, each.from_))
        for before, after in pairwise(in_order):
            if before.worker == after.worker and (before.to is None or before.to > after.from_):
                raise ValueError(f"absences of worker {after.worker} overlap at {after.from_:g}")
        return self

    def located(self, directory: Path) -> "Cluster":
        """Returns the cluster with its traces' paths, which are relative to ``directory``."""
        given = self.seconds_per_step
        found = [_located(each, directory) for each in given] if isinstance(given, list) else _located(given, directory)
        return self.model_copy(update={"seconds_per_step": found})

    def seconds_of(self, worker: int) -> Seconds:
        """Returns the seconds per step of one worker."""
        given = self.seconds_per_step
        return given[worker] if isinstance(given, list) else given

    @property
    def far(self) -> Exchange:
        """Time of an exchange between regions."""
        return self.between_regions or self.exchange

    def exchange_of(self, worker: int) -> Exchange:
        """Returns the time of a worker's exchange with a server in the first region."""
        return self.exchange if worker < self.workers // self.regions else self.far

    def region(self, number: int) -> "Cluster":
        """Returns the cluster of one region, counted from 0: its workers, with a server of their own."""
        size = self.workers // self.regions
        first, given = size * number, self.seconds_per_step
        absences = [
            each.model_copy(update={"worker": each.worker - first})
            for each in self.absences
            if first <= each.worker < first + size
        ]
        return Cluster(
            workers=size,
            seconds_per_step=given[first : first + size] if isinstance(given, list) else given,
            exchange=self.exchange,
            absences=absences,
        )


def _located(seconds: Seconds, directory: Path) -> Seconds:
    if not isinstance(seconds, Trace):
        return seconds
    return seconds.model_copy(update={"trace": directory / seconds.trace.expanduser()})


class Speed:
    """The seconds that each step of one worker takes.

    They are a function of the seed, the worker and the number of the step, so they are the same for all methods.

    Raises:
        ConfigurationError: a trace cannot be read.
    """

    def __init__(self, seconds: Seconds, worker: int, seed: int) -> None:
        self._seconds, self._seed = seconds, f"{seed}/{worker}/"
        self._trace = read_trace(seconds) if isinstance(seconds, Trace) else ()

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        if isinstance(self._seconds, Distribution):
            return self._seconds.mean
        return fmean(self._trace) if isinstance(self._seconds, Trace) else float(self._seconds)

    def of_step(self, number: int) -> float:
        """Returns the seconds of the worker's step with this number."""
        if isinstance(self._seconds, Distribution):
            return self._seconds.draw(random.Random(self._seed + str(number)))
        if isinstance(self._seconds, Trace):
            return self._trace[number % len(self._trace)]
        return float(self._seconds)

    def of_steps(self, first: int, count: int) -> float:
        """Returns the seconds of ``count`` steps together, from step ``first`` on; one draw where they are random."""
        if count == 1:
            return self.of_step(first)
        if isinstance(self._seconds, Distribution):
            return self._seconds.of_sum(count).draw(random.Random(self._seed + str(first)))
        if isinstance(self._seconds, Trace):
            whole, rest = divmod(count, len(self._trace))
            return whole * sum(self._trace) + sum(self.of_step(number) for number in range(first, first + rest))
        return count * float(self._seconds)


@cache
def read_trace(given: Trace) -> tuple[float, ...]:
    """Reads the recorded seconds per step of a trace.

    Raises:
        ConfigurationError: the file cannot be read, or has no seconds of this worker.
    """
    from fairseq_async.records.events import read_events  # imports torch: slow where a file has a mistake

    if given.trace.suffix != ".jsonl" and "worker" in given.model_fields_set:
        raise ConfigurationError(f"trace {given.trace}: a file of numbers is of one worker: leave worker out")
    try:
        if given.trace.suffix == ".jsonl":
            given.trace.stat()  # a log that does not exist would read as an empty one
            seconds = _of_events([event for event in read_events(given.trace) if event.worker == given.worker])
        else:
            seconds = [float(line) for line in given.trace.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"trace {given.trace} cannot be read: {error}") from error
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise ConfigurationError(f"trace {given.trace}: no seconds above 0 of worker {given.worker} in it")
    return tuple(seconds)


def _of_events(events: "list[Event]") -> list[float]:
    """Returns the seconds per step that local SGD's workers report, else the time between events less the exchange."""
    if events and events[0].computing_seconds is not None:
        return [(event.computing_seconds or 0.0) / event.local_steps for event in events if event.local_steps]
    gaps = [
        after.time - before.time - (after.push_seconds or 0.0) - (after.pull_seconds or 0.0)
        for before, after in pairwise(events)
    ]
    typical = fmean(gaps) if gaps else 0.0
    return [gap if gap > 0 else typical for gap in gaps]


class Presence:
    """The times at which one worker joins and dies, and at which its work is finished."""

    def __init__(self, absences: list[Absence], worker: int) -> None:
        own = sorted((a for a in absences if a.worker == worker), key=lambda a: a.from_)
        self.pauses = [a for a in own if a.pause]
        self.deaths = [a for a in own if not a.pause]

    def arrivals(self) -> list[float]:
        """Returns when the worker joins: at the beginning, unless it is absent then, and at the end of each absence.

        A pause is no absence here: the worker stays a member.
        """
        late = any(a.from_ == 0 for a in self.deaths)
        return ([] if late else [0.0]) + [a.to for a in self.deaths if a.to is not None]

    def departures(self) -> list[float]:
        """Returns when the worker dies."""
        return [a.from_ for a in self.deaths if a.from_ > 0]

    def done(self, start: float, seconds: float) -> float:
        """Returns when work of so many seconds that begins at ``start`` is finished, pauses included."""
        end = start + seconds
        for pause in self.pauses:
            assert pause.to is not None
            if pause.from_ < end and pause.to > start:
                end += pause.to - max(pause.from_, start)
        return end
