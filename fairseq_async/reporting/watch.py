"""The live view of a run, from its files alone."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.progress import Display, Progress

_PAUSE = 0.5
_QUIET = 10.0  # seconds without an update that are worth a word


class Watched(Progress):
    """A run's progress from its beginning. Its time is that of its last event and what has passed here since, so that
    the clocks of two machines need not agree.

    Raises:
        ConfigurationError: there is no run in the directory.
    """

    def __init__(self, run_dir: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._newest, self._heard = 0.0, monotonic()
        try:
            workers = int(json.loads((run_dir / "run.json").read_text())["workers"] or 0)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{run_dir}: no run there yet ({error})") from error
        super().__init__(run_dir / "events.jsonl", workers, self._now)
        self._offset, self._began = 0, 0.0

    def _now(self) -> float:
        return self._newest + self.silent

    @property
    def silent(self) -> float:
        """Seconds since an update was seen."""
        return self._monotonic() - self._heard

    def _take(self, event: dict[str, Any]) -> None:
        self._began = self._began or event["time"]
        self._newest, self._heard = max(self._newest, event["time"]), self._monotonic()
        super()._take(event)
        self._forget()

    def summary(self) -> str:
        return super().summary() + (f", nothing new for {self.silent:,.0f} s" if self.silent > _QUIET else "")


def follow(run_dir: Path) -> None:
    """Until Ctrl-C."""
    watched = Watched(run_dir)
    watched.poll()
    with Display(watched) as display:
        display.say(watched.summary())
        try:
            while True:
                display.refresh()
                time.sleep(_PAUSE)
        except KeyboardInterrupt:
            pass
