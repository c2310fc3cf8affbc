"""The simulated machines: how long a step takes each worker, what an exchange costs, and who is away when."""

import json
import math
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fairseq_async.errors import ConfigurationError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Distribution(_Strict):
    """Seconds that vary from step to step.

    Attributes:
        spread: standard deviation over mean; an exponential distribution has 1.
    """

    distribution: Literal["lognormal", "uniform", "exponential"]
    mean: float = Field(gt=0)
    spread: float = Field(0.2, ge=0, le=3)

    @model_validator(mode="after")
    def _possible(self) -> "Distribution":
        if self.distribution == "exponential" and "spread" in self.model_fields_set:
            raise ValueError("spread of an exponential distribution is 1: leave it out")
        if self.distribution == "uniform" and self.spread > 0.57:
            raise ValueError("spread of a uniform distribution is at most 0.57: no step takes less than no time")
        return self

    def draw(self, random_: random.Random) -> float:
        match self.distribution:
            case "exponential":
                return random_.expovariate(1 / self.mean)
            case "uniform":
                half = math.sqrt(3) * self.spread
                return self.mean * random_.uniform(1 - half, 1 + half)
        variance = math.log(1 + self.spread**2)
        return self.mean * math.exp(random_.gauss(-variance / 2, math.sqrt(variance)))


class Trace(_Strict):
    """Recorded seconds, used again from the first when they are at their end.

    Attributes:
        trace: a file of one number a line, or the ``events.jsonl`` of a real run.
        worker: whose seconds to take from an ``events.jsonl``.
    """

    trace: Path
    worker: int = Field(0, ge=0)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Distribution | Trace


class Absence(_Strict):
    """A worker that is not there for some time.

    Attributes:
        from_: virtual seconds; from 0 on, the worker comes late.
        to: None for ever.
        pause: it stands still and goes on where it was; else it dies, loses what it was computing, and comes back with
            a new inner optimizer.
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


class Exchange(_Strict):
    """What it costs to send the parameters' size one way, and what the server does with an update.

    Attributes:
        seconds: of each transfer, whatever its size.
        seconds_per_byte: as 8e-9 of a link of 1 Gbit/s.
        server_seconds: for which the server is busy with one update; others wait in line.
    """

    seconds: float = Field(0.0, ge=0)
    seconds_per_byte: float = Field(0.0, ge=0)
    server_seconds: float = Field(0.0, ge=0)

    def transfer(self, parameters: int) -> float:
        return self.seconds + self.seconds_per_byte * 4 * parameters


class Cluster(_Strict):
    """The workers.

    Attributes:
        workers: k.
        seconds_per_step: one for all, or one for each worker.
    """

    workers: int = Field(ge=1)
    seconds_per_step: Seconds | list[Seconds] = 1.0
    exchange: Exchange = Exchange()
    absences: list[Absence] = []

    @model_validator(mode="after")
    def _of_one_size(self) -> "Cluster":
        given = self.seconds_per_step
        if isinstance(given, list) and len(given) != self.workers:
            raise ValueError(f"seconds_per_step has {len(given)} entries for {self.workers} workers")
        for absence in self.absences:
            if absence.worker >= self.workers:
                raise ValueError(f"absences name worker {absence.worker}; there are {self.workers}, counted from 0")
        in_order = sorted(self.absences, key=lambda each: (each.worker, each.from_))
        for before, after in pairwise(in_order):
            if before.worker == after.worker and (before.to is None or before.to > after.from_):
                raise ValueError(f"absences of worker {after.worker} overlap at {after.from_:g}")
        return self

    def seconds_of(self, worker: int) -> Seconds:
        given = self.seconds_per_step
        return given[worker] if isinstance(given, list) else given


class Speed:
    """Seconds of the n-th step of a worker: a function of seed, worker and n, so that all methods meet the same ones.

    Raises:
        ConfigurationError: a trace cannot be read.
    """

    def __init__(self, seconds: Seconds, worker: int, seed: int) -> None:
        self._seconds, self._seed = seconds, f"{seed}/{worker}/"
        self._trace = read_trace(seconds) if isinstance(seconds, Trace) else ()

    def of_step(self, number: int) -> float:
        if isinstance(self._seconds, Distribution):
            return self._seconds.draw(random.Random(self._seed + str(number)))
        return self._trace[number % len(self._trace)] if self._trace else float(self._seconds)  # type: ignore[arg-type]


@cache
def read_trace(given: Trace) -> tuple[float, ...]:
    """The recorded seconds per step.

    Raises:
        ConfigurationError: the file is not there, or holds none.
    """
    try:
        lines = given.trace.read_text().splitlines()
        if given.trace.suffix == ".jsonl":
            seconds = _of_events([e for e in map(json.loads, lines) if e["worker"] == given.worker])
        else:
            seconds = [float(line) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"trace {given.trace} cannot be read: {error}") from error
    if not seconds or min(seconds) <= 0:
        raise ConfigurationError(f"trace {given.trace}: no seconds above 0 of worker {given.worker} in it")
    return tuple(seconds)


def _of_events(events: list[dict[str, Any]]) -> list[float]:
    """Of local SGD as its workers have said; else what lies between two events and was no exchange."""
    if events and "computing_seconds" in events[0]:
        return [e["computing_seconds"] / e["local_steps"] for e in events if e["local_steps"]]
    gaps = [b["time"] - a["time"] - b["push_seconds"] - b["pull_seconds"] for a, b in pairwise(events)]
    typical = fmean(gaps) if gaps else 0.0
    return [gap if gap > 0 else typical for gap in gaps]


class Presence:
    """When one worker is there, and when what it computes is done."""

    def __init__(self, absences: list[Absence], worker: int) -> None:
        own = sorted((a for a in absences if a.worker == worker), key=lambda a: a.from_)
        self.pauses = [a for a in own if a.pause]
        self.deaths = [a for a in own if not a.pause]

    def arrivals(self) -> list[float]:
        """When it comes: at the beginning, unless it is away then, and after each death."""
        late = any(a.from_ == 0 for a in self.deaths)
        return ([] if late else [0.0]) + [a.to for a in self.deaths if a.to is not None]

    def departures(self) -> list[float]:
        return [a.from_ for a in self.deaths if a.from_ > 0]

    def done(self, start: float, seconds: float) -> float:
        """When work of so many seconds is finished, pauses included."""
        end = start + seconds
        for pause in self.pauses:
            assert pause.to is not None
            if pause.from_ < end and pause.to > start:
                end += pause.to - max(pause.from_, start)
        return end
