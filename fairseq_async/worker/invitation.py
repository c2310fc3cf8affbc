"""The command with which one more worker joins a run, for the terminal."""

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.addresses import ANY
from fairseq_async.errors import as_flag
from fairseq_async.validation import split_address

_ANY = (ANY, "::")  # the server listens on every address of its machine
_OF_LAUNCHERS = ("local_rank", "local-rank")  # an argument that torchrun or deepspeed has added
_OF_THE_RUN = (as_flag("server"), as_flag("token_file"), as_flag("tls"))  # a worker that joins gets them otherwise


def invitation(address: str, token_file: Path, command: Sequence[str], tls: Path | None = None) -> str:
    """A line that says where the server is, and how one more worker joins it.

    Args:
        command: of a worker of the run.
        tls: directory of the certificates; None without.
    """
    host, port = split_address(address)
    reached = f"{socket.gethostname() if host in _ANY else host}:{port}"
    line = ["fairseq-async", "join", reached, as_flag("token_file"), str(token_file)]
    line += ([] if tls is None else [as_flag("tls"), str(tls)]) + ["--", *command]
    return f"server at {reached}; one more worker joins with: {shlex.join(line)}"


def own_command() -> list[str]:
    """The command of this process, as a worker that joins is to have it."""
    program, *arguments = sys.argv
    kept = [each for each in _without_values(arguments) if not each.lstrip("-").startswith(_OF_LAUNCHERS)]
    if program.endswith(".py") or not os.access(program, os.X_OK):
        return ["python", program, *kept]
    return [os.path.basename(program), *kept]


def _without_values(arguments: Sequence[str]) -> list[str]:
    """The arguments but for those, with their values, that belong to the run."""
    kept, skip = [], False
    for each in arguments:
        name, equals, _ = each.partition("=")
        if not skip and name not in _OF_THE_RUN:
            kept.append(each)
        skip = not skip and name in _OF_THE_RUN and not equals
    return kept
