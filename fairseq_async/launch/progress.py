"""How a run is doing, read from its ``events.jsonl`` while it is written."""

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_WINDOW = 15.0  # seconds over which rates and means are taken
_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


class Progress:
    """The events of the last seconds, and what follows from them. Starts at the end of the file that is there."""

    def __init__(self, path: Path, workers: int, clock: Callable[[], float] = time.time) -> None:
        self.path, self.workers, self.clock = path, workers, clock
        self._offset = path.stat().st_size if path.exists() else 0
        self._recent: deque[dict[str, Any]] = deque()
        self._began = clock()
        self.updates = {worker: 0 for worker in range(workers)}
        self.refused = self.version = 0

    def poll(self) -> None:
        """Takes the whole lines that were added."""
        if self.path.exists():
            if self.path.stat().st_size < self._offset:
                self._offset = 0  # a restart has taken events back
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._take(json.loads(line))
        self._forget()

    def _forget(self) -> None:
        while self._recent and self._recent[0]["time"] < self.clock() - _WINDOW:
            self._recent.popleft()

    def _take(self, event: dict[str, Any]) -> None:
        if event["time"] < self._began:
            return
        self._recent.append(event)
        self.updates[event["worker"]] = self.updates.get(event["worker"], 0) + 1
        self.version = max(self.version, event["version_after"])
        self.refused += event["status"] == "refused"

    def rows(self) -> list[tuple[str, int, float, float, float]]:
        """Name, updates, target tokens/s, mean staleness and loss (bits per token) of each worker and of all."""
        each = [
            self._row(f"worker {w}", n, [e for e in self._recent if e["worker"] == w]) for w, n in self.updates.items()
        ]
        return [*each, self._row("all", sum(self.updates.values()), list(self._recent))]

    def _row(self, name: str, updates: int, events: list[dict[str, Any]]) -> tuple[str, int, float, float, float]:
        applied = [event for event in events if event["status"] == "applied"]
        tokens = sum(_tokens(event) for event in applied)
        known = [event for event in applied if event.get("loss") is not None]
        loss = sum(event["loss"] * _tokens(event) for event in known) / max(1.0, sum(map(_tokens, known)))
        staleness = sum(event["staleness"] for event in applied) / max(1, len(applied))
        return name, updates, tokens / self._seconds(), staleness, loss

    @property
    def updates_per_second(self) -> float:
        """Applied updates: steps of the server."""
        versions = [event["version_after"] for event in self._recent]
        return (versions[-1] - versions[0]) / self._seconds() if versions else 0.0

    def _seconds(self) -> float:
        return max(1.0, min(_WINDOW, self.clock() - self._began))

    def summary(self) -> str:
        _, _, tokens, staleness, loss = self.rows()[-1]
        text = f"update {self.version}, {self.updates_per_second:.1f} updates/s, {tokens:,.0f} tokens/s, "
        text += f"staleness {staleness:.2f}, loss {loss:.3f}"
        return text + (f", {self.refused} refused" if self.refused else "")


def _tokens(event: dict[str, Any]) -> float:
    """Target tokens of an update, whose weight may be another number."""
    return float(event.get("tokens") or event["weight"])


class Display:
    """A table on a terminal; a line now and then elsewhere."""

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
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def refresh(self) -> None:
        self.progress.poll()
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif self.progress.clock() >= self._next_line:
            self._next_line += _LINE_EVERY
            self.say(self.progress.summary())

    def _table(self) -> Table:
        table = Table(title=self.progress.summary())
        for column in ("", "gradients", "tokens/s", "staleness", "loss"):
            table.add_column(column, justify="right")
        for name, updates, tokens, staleness, loss in self.progress.rows():
            table.add_row(name, f"{updates:,}", f"{tokens:,.0f}", f"{staleness:.2f}", f"{loss:.3f}")
        return table
