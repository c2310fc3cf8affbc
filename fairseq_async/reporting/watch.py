"""``fairseq-async watch``: the live view of a run, from its files alone."""

import time
from collections.abc import Callable
from pathlib import Path

from fairseq_async.launch.progress.display import Display, plain_console
from fairseq_async.launch.progress.progress import SERVER_LOG, Progress, log_text
from fairseq_async.protocol.notices import FINISHED, LISTENS
from fairseq_async.records.description import SUMMARY, RunDescription
from fairseq_async.records.events import LineReader

_PAUSE = 0.5  # seconds between two looks at the files
_QUIET = 10.0  # seconds without an update after which the summary says so


class WatchedRun(Progress):
    """A run's progress from its beginning, read on any machine that sees its files.

    Args:
        monotonic: this machine's clock, in seconds.

    Attributes:
        finished: whether the run has reached its end, and no further server has been started in its directory; of a
            simulation's trial, whether it is over.

    Raises:
        ConfigurationError: there is no run in the directory.
    """

    def __init__(self, run_dir: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.finished = False
        self._lines = LineReader(run_dir / SERVER_LOG, log_text)
        description = RunDescription.read(run_dir)
        self._trial = description.simulated is not None
        super().__init__(run_dir, description.workers or 0, monotonic, whole=True)

    def poll(self) -> None:
        """Reads what was added to the run's files since the last call."""
        self._look(self._read_end)
        super().poll()

    def _read_end(self) -> None:
        for line in self._lines:
            if line.startswith((LISTENS, FINISHED)):
                self.finished = line.startswith(FINISHED)
        self.finished = self.finished or (self._trial and (self.run_dir / SUMMARY).exists())

    def summary(self) -> str:
        """Returns the progress in one line, and for how long nothing new has come."""
        return super().summary() + (f", nothing new for {self.silent:,.0f} s" if self.silent > _QUIET else "")


def follow(run_dir: Path) -> None:
    """Shows a run's progress until it is finished, or until Ctrl-C."""
    watched = WatchedRun(run_dir)
    with Display(watched, plain_console()) as display:  # the view is what the command is for: not on stderr
        if not watched.finished:
            display.say(watched.summary())
        try:
            while not (watched.finished or display.closed):
                display.refresh()
                time.sleep(_PAUSE)
            display.say(f"finished: {watched.result()}")
        except KeyboardInterrupt:
            pass
