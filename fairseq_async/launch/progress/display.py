"""Shows a run's progress on the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fairseq_async.launch.progress.progress import Progress

_COLUMNS = ("staleness", "held\n(s)", "ahead", "loss")
_OF_COMPRESSED = ("sent\n(kB/s)", "fp32 /\nsent", "residual")
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


def plain_console(stderr: bool = False, width: int | None = None) -> Console:
    """Returns a console that shows text as it is: what others have written may look like markup."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False)


def say(console: Console, text: str) -> None:
    """Prints a line as it is.

    Raises:
        OSError: the line cannot be printed, as on a full disk.
        SystemExit: nobody reads the output any more (rich's answer to a broken pipe).
    """
    console.print(_plain(console, text), soft_wrap=True)


def _plain(console: Console, text: str, style: str = "") -> Text:
    """Returns a text that is no markup, with what the terminal has no letters for as escapes."""
    return Text(text.encode(console.encoding, "backslashreplace").decode(console.encoding), style)


class Display:
    """Shows a run's progress: a table on a terminal, a line every few seconds elsewhere.

    A run does not depend on it: a file that cannot be read, a value that has no text, a full disk or a closed terminal
    cost what would have been shown.

    Args:
        console: where it is shown; stderr by default.

    Attributes:
        closed: whether nobody reads the output any more.
    """

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress, self.closed = progress, False
        self.console = console or plain_console(stderr=True)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._next_line = progress.clock() + LINE_EVERY
        self._mistake = ""

    def __enter__(self) -> "Display":
        if self._live:
            with self._lost():
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with self._lost():
                self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line above the table."""
        with self._lost():
            say(self.console, text)

    def refresh(self) -> None:
        """Reads the new events and updates what is shown."""
        self.progress.poll()
        with self._lost():
            if self._live:
                self._live.update(self._table(), refresh=True)
            elif self.progress.clock() >= self._next_line:
                self._next_line += LINE_EVERY
                say(self.console, self.progress.status)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Lets nothing that goes wrong inside end the run; a mistake of our own is told once."""
        try:
            yield
        except (BrokenPipeError, SystemExit):
            self.closed = True
            self._forget()
        except OSError:  # the output has no room
            self._forget()
        except Exception as error:
            if (mistake := f"the progress cannot be shown: {error!r}") != self._mistake:
                self._mistake = mistake
                self.say(mistake)

    def _forget(self) -> None:
        with suppress(OSError, SystemExit), self.console.capture():  # else rich writes it again with each later line
            pass

    def _table(self) -> Table:
        rows = self.progress.rows()
        compressed = any(row.compressed for row in rows)
        table = Table(title=_plain(self.console, self.progress.status, "table.title"))
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
