"""Errors that a user can act upon: each is printed as one line, without a traceback."""

import sys
from collections.abc import Callable
from typing import NoReturn


class AsyncError(Exception):
    """Something that stops a run and that its user can act upon."""


class ConfigurationError(AsyncError):
    """A flag or a combination of flags that cannot work."""


class ExchangeError(AsyncError):
    """The server, or the memory shared with it, is not there or does not answer."""


class ProtocolError(ExchangeError):
    """The other side does not speak our protocol, or not correctly."""


class RefusedError(AsyncError):
    """The server does not take this worker or its updates."""


class CodecError(AsyncError, ValueError):
    """Values that no codec sends, such as NaN, or bytes that are not what it has sent."""


class HalfAppliedError(Exception):
    """A rule has failed in the middle of an update: the parameters are of no version, and no run goes on from them."""


def option(name: str) -> str:
    """An option as the user has written it: ``--token-file`` in a command, ``"token_file"`` in a DeepSpeed JSON."""
    return _spell[0](name)


def option_of(method: str, name: str) -> str:
    """As :func:`option`, of a synchronous method, whose flags begin with its name: ``--adasum-form``, ``"form"``."""
    return option(f"{method}_{name}" if _spell[0] is as_flag else name)


def spell_options(spell: Callable[[str], str]) -> None:
    """Sets how :func:`option` writes options in this process; by default as flags."""
    _spell[0] = spell


def as_key(name: str) -> str:
    """An option as a key of a DeepSpeed configuration."""
    return f'"{name}"'


def as_argument(name: str) -> str:
    """An option as an argument of a Python call."""
    return f"{name}="


def as_flag(name: str) -> str:
    """An option as a flag of a command."""
    return "--" + name.replace("_", "-")


_spell: list[Callable[[str], str]] = [as_flag]


def fail(error: object) -> NoReturn:
    """Ends the process with one line and the exit code of a mistake in what it was asked to do."""
    _failures.append(error)
    sys.stderr.write(f"fairseq-async: error: {error}\n")
    raise SystemExit(2)


def has_failed() -> bool:
    """Whether this process ends by :func:`fail`, or by an exception that nobody has caught; for exit handlers."""
    return bool(_failures) or getattr(sys, "last_value", None) is not None


_failures: list[object] = []
