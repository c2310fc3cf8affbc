"""The reader of ``events.jsonl`` for replays, reports and live views."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Generic, TypeVar

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject
from fairseq_async.options.validation import first_mistake
from fairseq_async.protocol.receipt import Status
from fairseq_async.records.event_log import PADDING, ControlEvent


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``: an update that reached the server, and what became of it.

    The fields down to ``status`` are the server's and always there. The others are from the worker's report, which
    depends on the method, measured by the server, or added by a recording; None where the line does not have them.
    ``docs/output_files.md`` has a table.
    """

    time: float
    worker: int
    sequence: int
    base_version: int
    staleness: int
    weight: float
    version_after: int
    status: Status
    norm: float | None = None
    cosine: float | None = None
    gain: float | None = None
    server_seconds: float | None = None
    position: JsonObject | None = None
    epochs: float | None = None
    loss: float | None = None
    tokens: float | None = None
    push_seconds: float | None = None
    pull_seconds: float | None = None
    local_steps: int | None = None
    step_seconds: float | None = None
    computing_seconds: float | None = None
    waiting_seconds: float | None = None
    held_seconds: float | None = None
    look_ahead: float | None = None
    micro_batches: int | None = None
    ranks: int | None = None
    share: float | None = None
    shard: int | None = None
    offset: int | None = None
    missing: str | None = None
    first_batch: str | None = None
    progress: float | None = None
    # The second name is the one in files of the first edition.
    progress_per_step: Annotated[float | None, Field(validation_alias=AliasChoices("progress_per_step", "pace"))] = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    residual_norm: float | None = None
    payload: str | None = None
    start_payload: str | None = None
    checksum: str | None = None
    merged: tuple[int, ...] = ()
    control_events: Annotated[
        tuple[ControlEvent, ...], Field(validation_alias=AliasChoices("control_events", "told"))
    ] = ()

    @staticmethod
    def from_json(line: bytes) -> "Event":
        """Parses one line; unknown fields are left out.

        Raises:
            pydantic.ValidationError: it is not JSON, or a field is missing or of another type.
        """
        return _EVENT.validate_json(line)

    @property
    def target_tokens(self) -> float:
        """Target tokens of the update; where none are reported, its weight (which may be sentences or local steps)."""
        return self.tokens or self.weight

    @property
    def exchange_seconds(self) -> float:
        """Seconds that the worker's exchange before this one took."""
        if self.waiting_seconds is not None:
            return self.waiting_seconds
        return (self.push_seconds or 0.0) + (self.pull_seconds or 0.0)


_EVENT = TypeAdapter(Event)
_Line = TypeVar("_Line")


class LineReader(Generic[_Line]):
    """Reads the whole lines of a ``.jsonl`` file, each once, while it may still be written.

    Iterating yields the lines that were added since the last time, or all lines of a file that has replaced the one
    before, as after a restart that took events back. A file that does not exist has no lines.

    Args:
        parse: makes a value of a line, or raises a pydantic.ValidationError.
        skip: called with the error of a line that cannot be parsed; the line is then left out. Without it the error is
            raised.

    Attributes:
        number: number of the last line that was read, from 1.
        replaced: how often a new file was found in place of the one before.
        cut: whether the file ended in the middle of a line when it was last read.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], _Line], skip: Callable[[str], object] | None = None
    ) -> None:
        self.path, self._parse, self._skip = path, parse, skip
        self.number, self.replaced, self.cut = 0, 0, False
        self._offset = 0
        self._held = -1  # descriptor of the file that was read: no other one has its inode as long as it is open

    def __iter__(self) -> Iterator[_Line]:
        """Yields the lines that were added, parsed.

        Raises:
            ConfigurationError: the file cannot be read, or a line not parsed; names the file, the line and the key.
        """
        for line in self._new_lines():
            try:
                yield self._parsed(line)
            except ConfigurationError as error:
                if self._skip is None:
                    raise
                self._skip(str(error))

    def skip_to_end(self) -> None:
        """Skips all lines that are there now."""
        for _ in self._new_lines():
            pass

    def _new_lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                self.cut = False
                self._begin_again_if_replaced(file)
                file.seek(self._offset)
                yield from self._whole_lines(file)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror}") from error

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        for line in file:
            if not line.endswith(b"\n"):
                self.cut = True
                return
            self._offset += len(line)
            self.number += 1
            yield line

    def _begin_again_if_replaced(self, file: BinaryIO) -> None:
        now = os.fstat(file.fileno())  # a new file may have grown longer than the old one before anybody looks
        same = self._held >= 0 and os.path.samestat(now, os.fstat(self._held))
        if self.number and (not same or now.st_size < self._offset):
            self.number = self._offset = 0
            self.replaced += 1
        if not same:
            held, self._held = self._held, os.dup(file.fileno())
            if held >= 0:
                os.close(held)

    def __del__(self) -> None:
        if self._held >= 0:
            os.close(self._held)

    def _parsed(self, line: bytes) -> _Line:
        try:
            return self._parse(line.lstrip(PADDING))
        except ValidationError as error:
            what = f"{self.path}, line {self.number}: not a line of fairseq-async: {first_mistake(error)}"
            raise ConfigurationError(what) from error


def read_events(path: Path) -> list[Event]:
    """Returns the events of a file up to its last whole line; none if there is no file.

    Raises:
        ConfigurationError: a line is not an event.
    """
    return list(LineReader(path, Event.from_json))


class Rollback(BaseModel):
    """One start of the server from an older state.

    Attributes:
        source: the state from which the server went on.
        sequences: the number of each worker's last update that is in this state.
        events: how many later events were taken back.
    """

    time: float
    source: str
    sequences: dict[int, int]
    events: int
