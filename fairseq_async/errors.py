"""Errors that a user can act upon, which are printed as one line, without a traceback; and the spelling of options."""

import errno
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

USER_ERROR = 2  # exit code of a process that cannot run as it was asked to: starting it again would not help
LOST_SERVER = 75  # exit code of a worker whose server is away, which is nobody's mistake: it may be started again
GIVE_A_MODEL = "give the directory of a run, or a checkpoint"  # what to do where the parameters are not in a file


class AsyncError(Exception):
    """An error that stops a run and that its user can act upon.

    Attributes:
        code: exit code of a command of ours that it ends.
    """

    code = 1


class ConfigurationError(AsyncError):
    """A flag or a combination of flags that cannot work."""

    code = USER_ERROR


class ExchangeError(AsyncError):
    """The server, or the memory shared with it, is not there or does not answer."""


class ProtocolError(ExchangeError):
    """The other side does not speak our protocol, or violates it."""


class RefusedError(AsyncError):
    """The server does not take this worker or its updates."""


class CodecError(AsyncError, ValueError):
    """A codec cannot encode values, such as NaN, or cannot decode bytes that it has not written."""


class BrokenFileError(Exception):
    """A file's content is proved to be another than what was written."""


class HalfAppliedError(Exception):
    """A rule has failed in the middle of an update: the parameters belong to no version, and no run can go on from
    them."""


def option(name: str) -> str:
    """Spells an option as its user writes it: ``--token-file`` in a command, ``"token_file"`` in a DeepSpeed JSON."""
    return _spell[0](name)


def option_of(method: str, name: str) -> str:
    """Spells an option of a synchronous method, whose flags begin with the method's name: ``--adasum-form``, or
    ``"form"``."""
    return option(f"{method}_{name}" if _spell[0] is as_flag else name)


def spell_options(spell: Callable[[str], str]) -> None:
    """Sets how :func:`option` spells options in this process; the default is flags."""
    _spell[0] = spell


def as_key(name: str) -> str:
    """Spells an option as a key of a DeepSpeed configuration."""
    return f'"{name}"'


def as_argument(name: str) -> str:
    """Spells an option as an argument of a Python call."""
    return f"{name}="


def as_flag(name: str) -> str:
    """Spells an option as a flag of a command."""
    return "--" + name.replace("_", "-")


def as_placeholder(name: str) -> str:
    """Marks an option in the messages of a server, which does not know the front end of its workers."""
    return f"{{option:{name}}}"


def spelled(message: str) -> str:
    """Returns a server's message with its options as the user of this process writes them."""
    return re.sub(r"\{option:(\w+)\}", lambda marked: option(marked[1]), message)


_spell: list[Callable[[str], str]] = [as_flag]


def disk_error(error: BaseException) -> BaseException:
    """Returns the system's error where torch could not write a file: torch's own, which comes behind it, does not say
    that the disk is full."""
    behind = error.__context__
    return behind if isinstance(behind, OSError) else error


def why_not_written(error: BaseException, directory: Path) -> str:
    """Returns why a file could not be written in this directory; of a full disk, where to make room."""
    why = disk_error(error)
    if isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full; make room in {directory}"
    return (why.strerror if isinstance(why, OSError) else None) or str(why)


_SCARCE = {
    *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.ENOSPC, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT),
}


def is_scarcity(error: BaseException) -> bool:
    """Whether an error says that the machine has too little of something now, such as memory, or does not give it; it
    says nothing of what was to be read."""
    allocation = isinstance(error, RuntimeError) and "allocate memory" in str(error)  # torch's
    return isinstance(error, MemoryError) or allocation or (isinstance(error, OSError) and error.errno in _SCARCE)


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or the error's name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def exit_code(error: object) -> int:
    """Returns the exit code of a process that an error ends: ``LOST_SERVER`` or ``USER_ERROR``."""
    lost = isinstance(error, ExchangeError) and not isinstance(error, ProtocolError)
    return LOST_SERVER if lost else USER_ERROR


def fail(error: object) -> NoReturn:
    """Ends the process with one line of error and the error's exit code."""
    _failures.append(error)
    sys.stderr.write(f"fairseq-async: error: {error}\n")
    raise SystemExit(exit_code(error))


def has_failed() -> bool:
    """Whether this process ends by :func:`fail`, by an uncaught exception or, after :func:`note_exit_codes`, by
    ``sys.exit`` with another code than 0; for exit handlers."""
    return bool(_failures) or getattr(sys, "last_value", None) is not None


def note_exit_codes() -> None:
    """Makes :func:`has_failed` know the code of ``sys.exit``, of which Python tells exit handlers nothing."""
    sys.exit = _exit


def _exit(code: object = None, /) -> NoReturn:
    if code:  # text, which Python prints, stands for 1
        _failures.append(code)
    _pythons_exit(code)  # type: ignore[arg-type]


_pythons_exit = sys.exit


_failures: list[object] = []
