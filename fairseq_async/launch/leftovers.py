"""What a launch that never became a run has made on the disk."""

from pathlib import Path


class Leftovers:
    """The logs and directories that are not there yet when a launch begins.

    Args:
        run_dir: where the run's files will go.
    """

    def __init__(self, run_dir: Path) -> None:
        self._logs = run_dir / "logs"
        self._before = set(self._logs.glob("*"))
        self._missing = [path for path in (self._logs, run_dir, *run_dir.parents) if not path.exists()]

    def remove(self) -> None:
        """Removes the logs that have come since, and the directories that are empty then."""
        for path in set(self._logs.glob("*")) - self._before:
            path.unlink(missing_ok=True)
        for directory in self._missing:
            try:
                directory.rmdir()
            except OSError:  # something else is in it
                return
