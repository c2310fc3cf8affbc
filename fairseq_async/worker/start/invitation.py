"""The command with which one more worker joins a run, as it is printed on the terminal."""

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.errors import as_flag
from fairseq_async.options.addresses import ANY
from fairseq_async.options.validation import split_address

_OF_LAUNCHERS = ("local_rank", "local-rank")  # an argument that torchrun or deepspeed has added
_OF_THE_RUN = (as_flag("server"), as_flag("token_file"), as_flag("tls"))  # fairseq-async join gives them to a worker


def invitation(address: str, token_file: Path, command: Sequence[str], tls: Path | None = None) -> str:
    """Returns a line that says where the server is, and how one more worker joins it.

    Args:
        command: the command of a worker of the run.
        tls: directory of the certificates; None without TLS.
    """
    host, port = split_address(address)
    reached = f"{socket.gethostname() if host == ANY else host}:{port}"
    line = ["fairseq-async", "join", reached, as_flag("token_file"), str(token_file)]
    line += ([] if tls is None else [as_flag("tls"), str(tls)]) + ["--", *command]
    return f"server at {reached}; one more worker joins with: {shlex.join(line)}"


def own_command() -> list[str]:
    """Returns the command of this process as a worker that joins has to run it; with ``SCRIPT.py`` for a script that
    has no file, as in a notebook."""
    program, *arguments = sys.argv
    kept = [each for each in _without_values(arguments) if not each.lstrip("-").startswith(_OF_LAUNCHERS)]
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None and spec.name != "__main__":  # python -m
        return ["python", "-m", spec.name.removesuffix(".__main__"), *kept]
    if not hasattr(main, "__file__"):  # a notebook, python - and python -c
        return ["python", "SCRIPT.py"]
    if program.endswith(".py") or not os.access(program, os.X_OK):
        return ["python", program, *kept]
    return [os.path.basename(program), *kept]


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without the flags in ``_OF_THE_RUN`` and their values."""
    kept, skip = [], False
    for each in arguments:
        name, equals, _ = each.partition("=")
        if not skip and name not in _OF_THE_RUN:
            kept.append(each)
        skip = not skip and name in _OF_THE_RUN and not equals
    return kept
