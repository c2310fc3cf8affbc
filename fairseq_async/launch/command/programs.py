"""Finds programs by their names, and tells which of them are fairseq's."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fairseq_async.environment import RANKS
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.methods import METHODS

_HYDRA = "fairseq-hydra-train"


def find_program(program: str) -> str:
    """Returns the path of a program, in PATH or in the directory of this Python.

    Raises:
        ConfigurationError: there is no such program.
    """
    found = shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
    if found is None:
        remedy = f"give python {program}" if program.endswith(".py") else "is it installed in this environment?"
        raise ConfigurationError(f"{program or '(empty)'}: no such program; {remedy}")
    return found


def of_ranks(line: list[str], worker: int, ranks: Sequence[int]) -> tuple[list[str], dict[str, str]]:
    """Returns the command and further environment variables of a worker, each rank of which runs ``line``.

    Args:
        ranks: numbers of ranks of all workers.
    """
    if max(ranks) == 1:
        return line, {}
    runs = str(Path(__file__).parents[2] / "server/programs/run_module.py")
    several = [sys.executable, runs, "fairseq_async.launch.ranks", str(ranks[worker]), *line]
    return several, {RANKS: ",".join(map(str, ranks))}


def numbers_of_ranks(given: str, workers: int) -> list[int]:
    """Returns the number of ranks of each worker, from the value of ``--ranks-per-worker``.

    Raises:
        ConfigurationError: it is neither one number for all, nor one for each.
    """
    try:
        numbers = [int(each) for each in given.split(",")]
    except ValueError:
        numbers = [0]
    numbers = numbers * workers if len(numbers) == 1 else numbers
    if len(numbers) != workers or min(numbers) < 1:
        raise ConfigurationError(
            f"--ranks-per-worker {given}: give a number of at least 1, or one for each of the {workers} workers: 2,1"
        )
    return numbers


@contextmanager
def executing(program: str) -> Iterator[None]:
    """Within it, a program is executed that :func:`find_program` has found.

    Raises:
        ConfigurationError: the system cannot execute it.
    """
    try:
        yield
    except OSError as error:
        of_script = error.errno in (errno.ENOEXEC, errno.ENOENT)
        remedy = "; a script's first line names its interpreter, as in #!/usr/bin/env python" if of_script else ""
        raise ConfigurationError(f"{program} cannot be executed: {error.strerror}{remedy}") from error


def is_fairseq(arguments: Sequence[str]) -> bool:
    """Whether a command is ``fairseq-train``; under another name, it is if its ``--optimizer`` is a method of ours.

    Raises:
        ConfigurationError: nothing was given, or another program of fairseq.
    """
    if not arguments:
        raise ConfigurationError("nothing to launch; give the command after --, as in: -- fairseq-train DATA ...")
    name = Path(arguments[0]).name
    if name == _HYDRA:
        raise ConfigurationError(
            f"{_HYDRA}: the methods are flags of fairseq-train, and hydra has none; give the same options to "
            "fairseq-train"
        )
    if name.startswith("fairseq-") and name != "fairseq-train":
        raise ConfigurationError(f"{name}: only a training has workers; give fairseq-train, or start {name} by itself")
    return name == "fairseq-train" or _optimizer(arguments) in METHODS


def _optimizer(arguments: Sequence[str]) -> str:
    """Returns the value of ``--optimizer``; empty where there is none."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, own = flag.partition("=")
        if name == "--optimizer":
            return own or value
    return ""
