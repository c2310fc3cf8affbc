"""A run's directory: whether messages can name it, and the files of a launch that never became a run."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.records.event_log import EVENTS
from fairseq_async.records.snapshots import DIRECTORY, OF_OTHER_RUNS


class CreatedFiles:
    """Remembers which of a run's files and directories exist when a launch begins, and removes those made later.

    Args:
        run_dir: where the run's files will go.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._logs, self._snapshots = run_dir, run_dir / "logs", run_dir / DIRECTORY
        files = (*self._files_of_run(), *self._set_aside(), *self._logs.glob("*"))
        self._before = {path for path in files if path.exists()}
        made = (self._logs, self._snapshots, run_dir, *run_dir.parents)
        self._missing = [path for path in made if not path.exists()]

    def remove(self, logs: bool) -> None:
        """Removes the files made since: a start in the same directory would take them for an interrupted run.

        A snapshot that was set aside since has its name again: whoever gives the right command next goes on from it.

        Args:
            logs: whether to remove the logs, too, as when the error that is shown says all that they have.
        """
        self._unlink(self._files_of_run())
        if logs:
            self._unlink(self._logs.glob("*"))
        for path in set(self._set_aside()) - self._before:
            path.replace(path.with_suffix(".pt"))
        self.remove_directories()

    def remove_directories(self) -> None:
        """Removes the directories made since that are empty; files in others may be another run's."""
        for directory in self._missing:
            with suppress(OSError):
                directory.rmdir()

    def _files_of_run(self) -> list[Path]:
        snapshots = [path for path in self._snapshots.glob("*") if path.suffix not in OF_OTHER_RUNS]
        return [self._run_dir / "run.json", self._run_dir / EVENTS, *snapshots]

    def _set_aside(self) -> list[Path]:
        return [path for path in self._snapshots.glob("*") if path.suffix in OF_OTHER_RUNS]

    def _unlink(self, paths: Iterable[Path]) -> None:
        for path in set(paths) - self._before:
            path.unlink(missing_ok=True)


def spellable(directory: Path, given: str) -> Path:
    """Returns a directory whose name messages can contain.

    Raises:
        ConfigurationError: this process's locale cannot spell the name, which the option ``given`` sets.
    """
    try:
        str(directory.absolute()).encode()
    except UnicodeEncodeError as error:
        said = f"this process's encoding ({sys.getfilesystemencoding()}) cannot spell it: set PYTHONUTF8=1"
        raise ConfigurationError(f"{directory} ({given}): {said}") from error
    return directory
