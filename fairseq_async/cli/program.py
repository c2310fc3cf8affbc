"""All commands, and what becomes of a user's mistake."""

import errno
import io
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fairseq_async import __version__
from fairseq_async.cli import demo, inspect, run, simulate
from fairseq_async.errors import AsyncError, why_not_written

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for commands in (demo, run, simulate, inspect):
    app.add_typer(commands.app)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fairseq-async {__version__}")
        raise typer.Exit


@app.callback()
def description(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """Asynchronous training of Transformers."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # a module of fairseq asks for DEBUG otherwise


def main() -> None:
    """Runs the command line; a mistake of the user's is one line and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding may not have every character
    try:
        os.getcwd()
    except FileNotFoundError:  # torch would not even load
        _fail("the working directory has been removed; change into one that exists", 2)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    for flag, value in zip(own, [*own[1:], None], strict=False):
        if flag.startswith("--") and (
            value == "" or flag.endswith("=")
        ):  # an empty path would be the working directory
            _fail(f"{flag.rstrip('=')} is empty: give a value, or leave the flag out", 2)
    run_app(app, "fairseq-async", sys.argv[1:] or ["--help"])


def run_app(app: typer.Typer, program: str, arguments: list[str]) -> NoReturn:
    """Runs the commands of a program, and ends it; a mistake of the user's is one line and exit code 2."""
    try:
        code = app(arguments, prog_name=program, standalone_mode=False)
        print(end="", flush=True)
    except AsyncError as error:
        _fail(str(error), error.code, program)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        _after_failed_write(error, program)
    except Exception as error:
        # typer has click's errors under another name in each version; all say what is wrong by format_message
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        command = context.command_path if context else " ".join([program, *arguments[:1]])
        _fail(f"{said}{'' if said.endswith('?') else ';'} {command} --help has the options", 2, program)
    sys.exit(code or 0)


def _after_failed_write(error: OSError, program: str) -> NoReturn:
    """Ends the program, with a line about a full disk, or too many open files; without one where the reader of a pipe
    has gone, as head does.

    Raises:
        OSError: the error is another.
    """
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        message = f"this process may have {limit} open files at a time, which is not enough: ulimit -n 1024 raises that"
        _fail(message, 2, program)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
        raise error
    if sys.stdout is not None:  # Python would write what is left, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        sys.exit(1)
    why = why_not_written(error, Path(error.filename).parent) if error.filename else "its disk is full; make room there"
    _fail(f"{error.filename or 'the output'} cannot be written: {why}", 1, program)


def _fail(message: str, code: int, program: str = "fairseq-async") -> NoReturn:
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
