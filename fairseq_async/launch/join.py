"""Adds one more worker to a run that is going on."""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from fairseq_async.environment import JOINS, SERVER, TLS, TOKEN, WORKER
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.programs import executing, find_program, is_fairseq, of_ranks
from fairseq_async.options.validation import split_address

_SECONDS = 10.0  # timeout of a connection


def join(address: str, arguments: list[str], token_file: Path, tls: Path | None, ranks: int = 1) -> NoReturn:
    """Replaces this process by the worker: its output goes to this terminal, and Ctrl-C ends this worker alone.

    Args:
        tls: directory of the run's certificates; None where the run has none.
        ranks: number of the worker's ranks; this process starts them, and ends when one of them does.

    Raises:
        ConfigurationError: the address or the token cannot be used, or there is no such program.
    """
    _reach(address)
    line, world = of_ranks(_line(arguments, ranks), 0, [ranks])
    from fairseq_async.exchange.authentication import read_token  # start-up time: torch comes with it

    variables = {WORKER: JOINS, SERVER: address, TOKEN: read_token(token_file), "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {} if tls is None else {TLS: str(tls.resolve())}
    with executing(line[0]):
        os.execve(line[0], line, {"OMP_NUM_THREADS": "1"} | os.environ | variables | world)


def _line(arguments: list[str], ranks: int) -> list[str]:
    """Returns the command with the flags by which fairseq-train loads this package; another program's as it is."""
    if is_fairseq(arguments):
        command = WorkerCommand(arguments, ranks=[ranks])
        if command.synchronous:
            raise ConfigurationError(
                "join: a synchronous method has no server to join; start all of its ranks together, with "
                "fairseq-async launch"
            )
        return command.line(None)
    return [find_program(arguments[0]), *arguments[1:]]


def _reach(address: str) -> None:
    """Checks the address before anything slow is imported. Where no server listens there, which may be about to start,
    it says so: the worker tries again for its ``server_timeout``.

    Raises:
        ConfigurationError: it is not an address, or of no machine.
    """
    try:
        socket.create_connection(split_address(address), timeout=_SECONDS).close()
    except (ValueError, socket.gaierror) as error:
        raise ConfigurationError(f"{address}: {error}") from error
    except OSError as error:
        print(
            f"fairseq-async: {address}: no server there ({error.strerror or error}); trying again for server_timeout; "
            "the run may have ended, or its launcher have printed another address",
            file=sys.stderr,
        )
