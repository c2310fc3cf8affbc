"""Shows a run's progress on the terminal."""

import errno

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fairseq_async.launch.progress import Progress

_COLUMNS = ("staleness", "held\n(s)", "ahead", "loss")
_OF_COMPRESSED = ("sent\n(kB/s)", "fp32 /\nsent", "residual")
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


def say(console: Console, text: str) -> None:
    """Prints a line as it is. On a full disk the line is lost, and the run goes on; a closed pipe ends it."""
    try:
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise


class Display:
    """Shows a run's progress: a table on a terminal, a line every few seconds elsewhere.

    Args:
        console: where it is shown; stderr by default.
    """

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console(stderr=True)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._next_line = progress.clock() + LINE_EVERY

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line above the table."""
        say(self.console, text)

    def refresh(self) -> None:
        """Reads the new events and updates what is shown."""
        self.progress.poll()
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif self.progress.clock() >= self._next_line:
            self._next_line += LINE_EVERY
            self.say(self.progress.status)

    def _table(self) -> Table:
        rows = self.progress.rows()
        compressed = any(row.compressed for row in rows)
        table = Table(title=self.progress.status)
        if compressed:  # ten columns, without lines between them, in a terminal of 80
            table.box, table.pad_edge, table.collapse_padding = None, False, True
        speed = [f"{self.progress.unit}/s"] if self.progress.unit else []
        for column in ("", "gradients", *speed, *_COLUMNS, *(_OF_COMPRESSED if compressed else ())):
            table.add_column(column, justify="right")
        for row in rows:
            cells = [f"{row.tokens:,.0f}"] if speed else []
            cells += f"{row.staleness:.2f}", f"{row.held_seconds:.3f}", f"{row.look_ahead:.2f}"
            own = () if row.compressed is None else row.compressed.cells(self.progress.seconds)
            table.add_row(row.name, f"{row.updates:,}", *cells, "" if row.loss is None else f"{row.loss:.3f}", *own)
        return table
