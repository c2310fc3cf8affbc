"""Files that commands read."""

from collections.abc import Callable
from pathlib import Path

from fairseq_async.errors import ConfigurationError


def find(path: Path, otherwise: Callable[[OSError], str]) -> None:
    """Says that a file is missing before the modules that would read it are imported."""
    try:
        path.stat()
    except OSError as error:
        raise ConfigurationError(otherwise(error)) from error
