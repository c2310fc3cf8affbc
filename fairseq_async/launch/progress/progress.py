"""The progress of a run, read from its ``events.jsonl`` while it is written."""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.progress.compressed import Compressed, read_sizes
from fairseq_async.launch.progress.earlier_launches import EarlierEvents, Pauses
from fairseq_async.launch.progress.run_length import RunLength, Work
from fairseq_async.protocol.notices import GONE, SEPARATOR
from fairseq_async.protocol.receipt import Status
from fairseq_async.records.event_log import EVENTS
from fairseq_async.records.events import Event, LineReader
from fairseq_async.records.validations import VALIDATIONS, Validation, parse_validation

_WINDOW = 15.0  # seconds over which rates and means are taken
_FAR = 1e9  # seconds; an end that is farther away is not shown
_BUSY = 0.2  # share of the time that the server works, from which on it is told
SERVER_LOG = Path("logs") / "server.log"


class Row(NamedTuple):
    """Rates and means over the last seconds, of one worker or of all.

    Attributes:
        name: name of the worker, or "all".
        updates: number of updates since the beginning.
        tokens: target tokens per second; where none are counted, the sum of the updates' weights.
        staleness: mean staleness of the updates.
        held_seconds: mean time for which an update waited for others.
        look_ahead: mean number of versions ahead at which the worker started.
        loss: nats per token, as in ``events.jsonl``; None where no update has a loss.
        compressed: statistics of compressed updates; None where updates are not compressed.
    """

    name: str
    updates: int
    tokens: float
    staleness: float
    held_seconds: float
    look_ahead: float
    loss: float | None
    compressed: Compressed | None = None


class Progress:
    """How far a run is, and its rates and means over the last seconds.

    The server may be on another machine, whose clock differs: times of events are compared with each other, and with
    what has passed here since the last one was seen.

    Args:
        run_dir: the run's directory.
        workers: number of workers at the beginning; others are added when they appear.
        clock: returns seconds that do not go back.
        whole: whether the events that are there already belong to the part of the run that is shown. Else they count
            only for the position in the run.

    Attributes:
        updates: number of updates of each worker in this part of the run.
        version: version of the server's parameters.
        unread: why the run's files could not be read at the last look; empty where they could be.
    """

    def __init__(
        self, run_dir: Path, workers: int, clock: Callable[[], float] = time.monotonic, whole: bool = False
    ) -> None:
        self.run_dir, self.workers, self.clock = run_dir, workers, clock
        # lines that cannot be read are skipped here; an audit names them
        self._events = LineReader(run_dir / EVENTS, Event.from_json, skip=lambda _: None)
        self._log = LineReader(run_dir / SERVER_LOG, log_text)
        self._said, self.unread = "the processes start", ""
        self._validations = LineReader(run_dir / VALIDATIONS, parse_validation, skip=lambda _: None)
        self._began = self._seen_at = clock()
        self._earlier = None if whole else EarlierEvents(run_dir)
        self._pauses = Pauses(run_dir)
        self._validation: Validation | None = None
        self._length: RunLength | None = None
        self._sizes: list[int] | None = None
        self._look(self._log.skip_to_end)
        self._reset()
        self.poll()

    def _reset(self) -> None:
        self._replaced = self._events.replaced
        self._recent: deque[Event] = deque()
        self._version_before = 0  # the first of _recent
        self.updates = {worker: 0 for worker in range(self.workers)}
        self.refused = self.version = 0
        self._work = Work()
        self._newest = 0.0  # time of an event
        self._first: tuple[float, float] | None = None  # of the first update: its time (later by pauses), the part done
        self._pauses.begin_again()
        if self._earlier is not None:
            self._earlier.look()

    def _reset_if_replaced(self) -> None:
        if self._events.replaced > self._replaced:
            self._reset()

    def poll(self) -> None:
        """Reads the events that were added since the last call; after a restart of the server, all that it has kept.

        What cannot be read now, as on a file system that does not answer for a while, is read at a later call.
        """
        self._look(self._read)

    def _look(self, read: Callable[[], None]) -> None:
        try:
            read()
            self.unread = ""
        except ConfigurationError as error:
            self.unread = str(error)

    def _read(self) -> None:
        self._pauses.look()
        if self._earlier is not None:
            self._earlier.look()
        for event in self._events:
            self._reset_if_replaced()
            self._add(event)
        self._reset_if_replaced()  # by a file without any event
        for validation in self._validations:
            self._validation = validation
        self._drop_old()

    def _drop_old(self) -> None:
        now = self._newest + self.silent
        while self._recent and self._recent[0].time < now - _WINDOW:
            self._version_before = self._recent.popleft().version_after

    @property
    def begun(self) -> bool:
        """Whether an update of this part of the run is known, or may be there unread."""
        return bool(self.unread) or any(self.updates.values())

    @property
    def silent(self) -> float:
        """Seconds since an update was seen here."""
        return self.clock() - self._seen_at

    def _add(self, event: Event) -> None:
        if event.status is Status.APPLIED:
            self._count(event)
        self.version = max(self.version, event.version_after)
        if self._earlier is not None and event in self._earlier:
            return
        if self._first is not None:
            self._first = self._first[0] + self._pauses.before(event, self._newest), self._first[1]
        self._newest, self._seen_at = max(self._newest, event.time), self.clock()
        if self._first is None:
            self._length, self._sizes = self._read_length(), read_sizes(self.run_dir)
            self._first = event.time, self._length.fraction(self._work)
            self._version_before = event.base_version + event.staleness
        self._recent.append(event)
        self.updates[event.worker] = self.updates.get(event.worker, 0) + 1
        self.refused += event.status is Status.REFUSED
        self._drop_old()

    def _count(self, event: Event) -> None:
        self._work.updates += 1
        self._work.version = event.version_after
        self._work.local_steps += event.local_steps or 0
        self._work.epochs += event.epochs or 0.0

    def _read_length(self) -> RunLength:
        try:
            return RunLength.read(self.run_dir)
        except ConfigurationError:  # the length is for the display alone: go on without it
            return RunLength(self.workers)

    def rows(self) -> list[Row]:
        """Returns a row for each worker, and one for all."""
        each = [
            self._row(f"worker {w}", n, [e for e in self._recent if e.worker == w]) for w, n in self.updates.items()
        ]
        return [*each, self._row("all", sum(self.updates.values()), list(self._recent))]

    def _row(self, name: str, updates: int, events: list[Event]) -> Row:
        applied = [event for event in events if event.status is Status.APPLIED]
        tokens = sum(event.target_tokens for event in applied)
        losses = [(e.loss, e.target_tokens) for e in applied if e.loss is not None and e.target_tokens]
        return Row(
            name,
            updates,
            tokens / self.seconds,
            _mean([event.staleness for event in applied]),
            _mean([event.held_seconds or 0.0 for event in applied]),
            _mean([event.look_ahead or 0.0 for event in applied]),
            sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses) if losses else None,
            Compressed.of(events, self._sizes),
        )

    @property
    def updates_in_a_step(self) -> float:
        """Mean number of updates in a step of the server; 0 where it has not stepped."""
        applied = sum(event.status is Status.APPLIED for event in self._recent)
        return applied / self._steps if self._steps else 0.0

    @property
    def updates_per_second(self) -> float:
        """Steps of the server per second."""
        return self._steps / self.seconds

    @property
    def _steps(self) -> int:
        """Number of steps of the server in the last seconds."""
        return self._recent[-1].version_after - self._version_before if self._recent else 0

    @property
    def seconds(self) -> float:
        """Number of seconds over which rates are taken."""
        ran = self.clock() - self._began
        if self._earlier is None and self._first is not None:
            ran = self._newest + self.silent - self._first[0]
        return max(1.0, min(_WINDOW, ran))

    @property
    def unit(self) -> str:
        """What :attr:`Row.tokens` counts: ``tokens``, ``local steps``, or nothing that has a name (empty)."""
        return self._length.unit if self._length else "tokens"

    @property
    def position(self) -> str:
        """How far the run is: ``update 120 of 5,000, epoch 3 of 10``."""
        return (self._length or self._read_length()).describe(self._work)

    @property
    def time_left(self) -> str:
        """The time to the run's end at the speed so far: ``, 0:12:30 left``; empty where it is not known."""
        if self._length is None or self._first is None:
            return ""
        began, before = self._first
        done, seconds = self._length.fraction(self._work), self._newest - began
        if not before < done < 1 or seconds <= 1:
            return ""
        left = seconds * (1 - done) / (done - before)
        return f", {timedelta(seconds=round(left))} left" if left < _FAR else ""

    @property
    def status(self) -> str:
        """The progress in one line; before the first update, what the run waits for."""
        text = f"starting: {self._waited_for()}" if self._first is None else self.summary()
        return f"{text}; {self.unread}" if self.unread else text

    def summary(self) -> str:
        """Returns the progress in one line."""
        every = self.rows()[-1]
        text = f"{self.position}{self.time_left}, {self.updates_per_second:.1f} updates/s, "
        text += f"{every.tokens:,.0f} {self.unit}/s, " if self.unit else ""
        text += f"{self.updates_in_a_step:.1f} in a step, staleness {every.staleness:.2f}"
        return text + self._losses(every) + _sent(every.compressed, self.seconds) + self._refused() + self._busy()

    def result(self) -> str:
        """Returns how far the run has come, in one line: without the rates, which are those of the last seconds."""
        return self.position + self._losses(self.rows()[-1]) + self._refused()

    def _losses(self, every: Row) -> str:
        return ("" if every.loss is None else f", loss {every.loss:.3f}") + self._validated()

    def _refused(self) -> str:
        return f", {self.refused} refused" if self.refused else ""

    def _busy(self) -> str:
        """Returns the share of the time in which the server works on updates as text; empty where it is small."""
        share = sum(event.server_seconds or 0.0 for event in self._recent) / self.seconds
        return f", server {share:.0%} busy" if share >= _BUSY else ""

    def _validated(self) -> str:
        """Returns the last validation's loss and score as text; empty without a validation."""
        last = self._validation
        if last is None or last.loss is None:
            return ""
        score = f", {last.metric} {last.score:.2f}" if last.metric and last.score is not None else ""
        return f", validation at update {last.updates:,}: loss {last.loss:.3f}{score}"

    def _waited_for(self) -> str:
        """Returns the last line that the server has written to its log; of a worker that has died, the launcher says
        more."""
        for line in self._log:
            if line and not line.endswith(GONE):
                self._said = line
        return self._said


def log_text(line: bytes) -> str:
    """Returns a line of the server's log without its time; empty for a line that a library has written."""
    _, found, text = line.decode(errors="replace").rpartition(SEPARATOR)
    return text.strip() if found else ""


def _sent(compressed: Compressed | None, seconds: float) -> str:
    """Returns the statistics of compressed updates as text; empty without compressed updates."""
    if compressed is None:
        return ""
    rate, ratio, residual = compressed.cells(seconds)
    return f", {rate} kB/s sent, 1/{ratio} of fp32" + ("" if compressed.residual is None else f", residual {residual}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
