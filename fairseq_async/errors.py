"""Errors that a user can mend: each is printed as one line, without a traceback."""


class AsyncError(Exception):
    """Something that stops a run and that its owner can act upon."""


class ConfigurationError(AsyncError):
    """A flag or a combination of flags that cannot work."""


class ExchangeError(AsyncError):
    """The server, or the memory shared with it, is not there or does not answer."""


class RefusedError(AsyncError):
    """The server does not take this worker or its updates."""
