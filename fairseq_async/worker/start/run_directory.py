"""The directory of a run: made, and locked against other runs as long as one of the run's processes lives."""

import fcntl
import os
import time
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.records.created_files import spellable
from fairseq_async.records.state_files import ending_path

ENDING_SECONDS = 120.0  # that the next run waits for the last snapshot of the one before
_BUSY_SECONDS = 10.0  # that it waits for a server that may not have noticed yet that its launcher is gone


def make_directories(run_dir: Path, logs: Path, given: str) -> None:
    """Makes the run's directory, which the option ``given`` sets, and that of its logs.

    Raises:
        ConfigurationError: they cannot be made, or cannot be written to, or messages cannot name them.
    """
    try:
        spellable(run_dir, given).mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a character that no file name can have
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigurationError(f"{run_dir} ({given}) cannot be made: {said}") from error
    if not os.access(run_dir, os.W_OK):
        raise ConfigurationError(f"{run_dir} ({given}) cannot be written to")


def claim(run_dir: Path, given: str) -> int:
    """Locks the directory against other runs, as long as the returned descriptor is open in any process."""
    descriptor, began = os.open(run_dir, os.O_RDONLY), time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            patience = ENDING_SECONDS if ending_path(run_dir).exists() else _BUSY_SECONDS
            if time.monotonic() < began + patience:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise ConfigurationError(f"{run_dir} ({given}) is in use by another run") from error
        ending_path(run_dir).unlink(missing_ok=True)
        return descriptor
