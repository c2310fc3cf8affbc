"""``fairseq-async watch``: the live view of a run, from its files alone."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fairseq_async.launch.display import Display
from fairseq_async.launch.progress import Progress
from fairseq_async.server.run_files.description import RunDescription
from fairseq_async.server.run_files.events import Event

_PAUSE = 0.5  # seconds between two looks at the files
_QUIET = 10.0  # seconds without an update after which the summary says so


class WatchedRun(Progress):
    """A run's progress from its beginning, read on any machine that sees its files.

    Its clock is the time of the run's last event plus what has passed here since then, so the clocks of the two
    machines need not agree.

    Args:
        monotonic: this machine's clock, in seconds.

    Raises:
        ConfigurationError: there is no run in the directory.
    """

    def __init__(self, run_dir: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._newest, self._seen_at = 0.0, monotonic()
        workers = RunDescription.read(run_dir).workers or 0
        super().__init__(run_dir, workers, self._now, began=0.0)

    def _now(self) -> float:
        return self._newest + self.silent

    @property
    def silent(self) -> float:
        """Seconds since the last update was seen here."""
        return self._monotonic() - self._seen_at

    def _add(self, event: Event) -> None:
        self._began = self._began or event.time
        self._newest, self._seen_at = max(self._newest, event.time), self._monotonic()
        super()._add(event)
        self._drop_old()

    def summary(self) -> str:
        """Returns the progress in one line, and for how long nothing new has come."""
        return super().summary() + (f", nothing new for {self.silent:,.0f} s" if self.silent > _QUIET else "")


def follow(run_dir: Path) -> None:
    """Shows a run's progress until Ctrl-C."""
    watched = WatchedRun(run_dir)
    watched.poll()
    with Display(watched, Console()) as display:  # the view is what the command is for: not on stderr
        display.say(watched.summary())
        try:
            while True:
                display.refresh()
                time.sleep(_PAUSE)
        except KeyboardInterrupt:
            pass
