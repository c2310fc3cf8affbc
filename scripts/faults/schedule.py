"""Schedules of faults, in YAML files.

::

    faults:
      - {kind: kill, target: server, version: 40}
      - {kind: pause, target: 1, seconds: 5, at: 12.5}
      - {kind: drop, target: 0, of: reply, message: 3}
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fairseq_async.errors import ConfigurationError

_OF_PROCESSES = ("kill", "pause")
_OF_MESSAGES = ("delay", "drop", "duplicate", "corrupt")
_LASTING = ("pause", "partition", "delay")


class Fault(BaseModel):
    """One fault, which happens when ``at``, ``version`` or ``message`` is reached; exactly one of these is set.

    Attributes:
        kind: ``kill`` (SIGKILL) and ``pause`` (SIGSTOP, later SIGCONT) a process; ``partition`` a worker from the
            server, whose connection stays open; ``delay``, ``drop``, ``duplicate`` or ``corrupt`` one of its messages.
            A dropped message also closes its connection, because TCP never loses a single message.
        target: the server, or a worker's number.
        of: the message that is hit: the worker's request, or the server's reply to it.
        seconds: duration of a pause, a partition or a delay.
        at: seconds after the start.
        version: the server's version.
        message: number of the worker's request, counted from 1 when it joined.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["kill", "pause", "partition", "delay", "drop", "duplicate", "corrupt"]
    target: Literal["server"] | int
    of: Literal["request", "reply"] = "request"
    seconds: float | None = Field(None, gt=0)
    at: float | None = Field(None, ge=0)
    version: int | None = Field(None, ge=0)
    message: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "Fault":
        if (self.at, self.version, self.message).count(None) != 2:
            raise ValueError("give one of at, version and message")
        if self.target == "server" and self.kind not in _OF_PROCESSES:
            raise ValueError(f"{self.kind} is for a worker")
        if self.message is not None and self.kind in _OF_PROCESSES:
            raise ValueError(f"{self.kind} cannot wait for a message")
        if (self.seconds is not None) != (self.kind in _LASTING):
            raise ValueError(f"{self.kind} {'has no' if self.seconds else 'needs'} seconds")
        if self.kind == "duplicate" and self.of == "reply":
            raise ValueError("TCP does not duplicate: only a worker that asks again does")
        return self

    @property
    def concerns_process(self) -> bool:
        return self.kind in _OF_PROCESSES


class Schedule(BaseModel):
    """A schedule: faults in any order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> "Schedule":
        return cls(faults=tuple(faults))


def read(path: Path) -> Schedule:
    """Reads the schedule in a file.

    Raises:
        ConfigurationError: the file holds no valid schedule; the message names the first mistake.
    """
    try:
        return Schedule.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path}: {where}: {first['msg']}") from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: {str(error).splitlines()[0]}") from error
