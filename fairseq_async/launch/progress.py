"""The progress of a run, read from its ``events.jsonl`` while it is written."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fairseq_async.server.events import Event, LineReader
from fairseq_async.server.parameter_server import Status

_WINDOW = 15.0  # seconds over which rates and means are taken
_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


class Row(NamedTuple):
    """What the last seconds had of one worker, or of all.

    Attributes:
        name: of the worker.
        updates: since the beginning.
        tokens: target tokens/s.
        staleness: mean of the updates.
        held_seconds: mean time for which an update waited for others.
        look_ahead: mean number of versions at which the worker started ahead.
        loss: nats per token, as in ``events.jsonl``.
    """

    name: str
    updates: int
    tokens: float
    staleness: float
    held_seconds: float
    look_ahead: float
    loss: float


class Progress:
    """A run's updates, and its rates and means over the last seconds.

    Args:
        path: the ``events.jsonl``.
        workers: how many there are to begin with; others are added when they appear.
        clock: seconds since 1970.
        from_start: whether to count the events that are there already.
    """

    def __init__(
        self, path: Path, workers: int, clock: Callable[[], float] = time.time, from_start: bool = False
    ) -> None:
        self.workers, self.clock = workers, clock
        self._events = LineReader(path, Event.from_json, skip=lambda _: None)  # an audit names what is no event
        if not from_start:
            self._events.skip()
        self._began = clock()
        self._reset()

    def _reset(self) -> None:
        self._replaced = self._events.replaced
        self._recent: deque[Event] = deque()
        self.updates = {worker: 0 for worker in range(self.workers)}
        self.refused = self.version = 0

    def poll(self) -> None:
        """Reads the events that were added since; after a restart of the server, all that it has kept."""
        for event in self._events:
            if self._events.replaced > self._replaced:
                self._reset()
            self._add(event)
        self._drop_old()

    def _drop_old(self) -> None:
        while self._recent and self._recent[0].time < self.clock() - _WINDOW:
            self._recent.popleft()

    def _add(self, event: Event) -> None:
        if event.time < self._began:
            return
        self._recent.append(event)
        self.updates[event.worker] = self.updates.get(event.worker, 0) + 1
        self.version = max(self.version, event.version_after)
        self.refused += event.status is Status.REFUSED

    def rows(self) -> list[Row]:
        """A row for each worker, and one for all."""
        each = [
            self._row(f"worker {w}", n, [e for e in self._recent if e.worker == w]) for w, n in self.updates.items()
        ]
        return [*each, self._row("all", sum(self.updates.values()), list(self._recent))]

    def _row(self, name: str, updates: int, events: list[Event]) -> Row:
        applied = [event for event in events if event.status is Status.APPLIED]
        tokens = sum(event.target_tokens for event in applied)
        losses = [(event.loss, event.target_tokens) for event in applied if event.loss is not None]
        return Row(
            name,
            updates,
            tokens / self._seconds(),
            _mean([event.staleness for event in applied]),
            _mean([event.held_seconds or 0.0 for event in applied]),
            _mean([event.look_ahead or 0.0 for event in applied]),
            sum(loss * weight for loss, weight in losses) / max(1.0, sum(weight for _, weight in losses)),
        )

    @property
    def updates_in_a_step(self) -> float:
        """Mean number of updates with which the server has stepped; 0 where it has not stepped."""
        applied = [event for event in self._recent if event.status is Status.APPLIED]
        steps = applied[-1].version_after - applied[0].version_after if applied else 0
        return (len(applied) - 1) / steps if steps else 0.0

    @property
    def updates_per_second(self) -> float:
        """Steps of the server per second."""
        versions = [event.version_after for event in self._recent]
        return (versions[-1] - versions[0]) / self._seconds() if versions else 0.0

    def _seconds(self) -> float:
        return max(1.0, min(_WINDOW, self.clock() - self._began))

    def summary(self) -> str:
        """The progress in one line."""
        every = self.rows()[-1]
        text = f"update {self.version}, {self.updates_per_second:.1f} updates/s, {every.tokens:,.0f} tokens/s, "
        text += f"{self.updates_in_a_step:.1f} in a step, staleness {every.staleness:.2f}, loss {every.loss:.3f}"
        return text + (f", {self.refused} refused" if self.refused else "")


class Display:
    """Shows a run's progress: a table on a terminal, a line every few seconds elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.console = Console(stderr=True)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._next_line = progress.clock() + _LINE_EVERY

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line above the table."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def refresh(self) -> None:
        """Reads the new events and shows what follows from them."""
        self.progress.poll()
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif self.progress.clock() >= self._next_line:
            self._next_line += _LINE_EVERY
            self.say(self.progress.summary())

    def _table(self) -> Table:
        table = Table(title=self.progress.summary())
        for column in ("", "gradients", "tokens/s", "staleness", "held (s)", "ahead", "loss"):
            table.add_column(column, justify="right")
        for name, updates, *rates, loss in self.progress.rows():
            tokens, staleness, held, ahead = rates
            cells = f"{tokens:,.0f}", f"{staleness:.2f}", f"{held:.3f}", f"{ahead:.2f}", f"{loss:.3f}"
            table.add_row(name, f"{updates:,}", *cells)
        return table


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
