"""Programs by their names, and which of them are fairseq's."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.methods import METHODS

_HYDRA = "fairseq-hydra-train"


def find_program(program: str) -> str:
    """The path of a program, in PATH or beside this Python.

    Raises:
        ConfigurationError: there is none.
    """
    found = shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
    if found is None:
        remedy = f"give python {program}" if program.endswith(".py") else "is it installed in this environment?"
        raise ConfigurationError(f"{program or '(empty)'}: no such program; {remedy}")
    return found


def is_fairseq(arguments: Sequence[str]) -> bool:
    """Whether a command is ``fairseq-train``, under whichever name: then it has ``--optimizer`` with a method of ours.

    Raises:
        ConfigurationError: nothing was given, or fairseq's other program for training.
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
    """The value of ``--optimizer``; empty where there is none."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, own = flag.partition("=")
        if name == "--optimizer":
            return own or value
    return ""
