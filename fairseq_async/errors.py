"""Errors that a user can mend: each is printed as one line, without a traceback."""

import sys
from typing import NoReturn


class AsyncError(Exception):
    """Something that stops a run and that its owner can act upon."""


class ConfigurationError(AsyncError):
    """A flag or a combination of flags that cannot work."""


class ExchangeError(AsyncError):
    """The server, or the memory shared with it, is not there or does not answer."""


class ProtocolError(ExchangeError):
    """The other side does not speak our protocol, or not correctly."""


class RefusedError(AsyncError):
    """The server does not take this worker or its updates."""


def fail(error: object) -> NoReturn:
    """Ends the process with one line and the exit code of a mistake in what it was asked to do."""
    sys.stderr.write(f"fairseq-async: error: {error}\n")
    raise SystemExit(2)
