"""Files that commands read."""

from collections.abc import Callable
from pathlib import Path

from fairseq_async.errors import ConfigurationError


def find(path: Path, otherwise: Callable[[str], str]) -> None:
    """Says, with the system's reason, that a file is missing, before the modules that would read it are imported."""
    try:
        path.stat()
    except OSError as error:
        raise ConfigurationError(otherwise(error.strerror or str(error))) from error
