"""Shows a run's progress on the terminal."""

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fairseq_async.launch.progress import Progress

_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


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
            self.say(self.progress.status)

    def _table(self) -> Table:
        table = Table(title=self.progress.status)
        for column in ("", "gradients", "tokens/s", "staleness", "held (s)", "ahead", "loss"):
            table.add_column(column, justify="right")
        for name, updates, *rates, loss in self.progress.rows():
            tokens, staleness, held, ahead = rates
            cells = f"{tokens:,.0f}", f"{staleness:.2f}", f"{held:.3f}", f"{ahead:.2f}"
            table.add_row(name, f"{updates:,}", *cells, "" if loss is None else f"{loss:.3f}")
        return table
