"""Helpers to run the steps of a recipe: each sub-process has a log, and a result is either complete or absent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from fairseq_async.cli.program import run_app


def program() -> str:
    """Return what the user has started, for the usage line; a wrapper script sets FAIRSEQ_ASYNC_SCRIPT to its name."""
    return os.environ.get("FAIRSEQ_ASYNC_SCRIPT") or f"python {sys.argv[0]}"


def run_main(main: Callable[..., None]) -> None:
    """Runs a program whose options are those of the function `main`; a wrong option is one line and exit code 2.

    SIGTERM ends its sub-processes, too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_app(app, program(), sys.argv[1:])


class RecipeError(SystemExit):
    """A failure the user can act on: ends the program with one line on stderr and exit code 1."""


def once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return `directory`, made by `make` unless it is there already.

    `make` fills a directory of another name, which is renamed at the end. So an interrupted run leaves no directory
    that looks finished; its partial result is lost. If two programs make the directory at the same time, the second
    uses the result of the first.
    """
    if not directory.exists():
        partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise RecipeError(f"{directory} cannot be made: {error.strerror}") from None
        try:
            make(partial)
            _rename(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def _rename(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError:
        if not directory.exists():
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: it has all of `text`, or is not written."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def console_script(name: str) -> str:
    """Return the path of the command `name`: in this Python's environment, activated or not, or else on the PATH."""
    script = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if script is None:
        raise RecipeError(
            f"{name} is not installed: activate the environment that has it, or pip install fairseq-fixed"
        )
    return script


def environment() -> dict[str, str]:
    """Return environment variables for sub-processes: one thread each, as workers share the cores; the user's win."""
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def run_step(step: str, command: Sequence[str], log: Path) -> None:
    """Run `command` with its output in `log`; raise a RecipeError that names `step` if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment()).returncode
    if code:
        raise RecipeError(f"{step} failed with exit code {code}: see {log}")


def run_in_front(command: Sequence[str]) -> int:
    """Run a program that handles interruptions itself, and return its exit code when it has ended.

    Ctrl-C reaches the program from the terminal, and SIGTERM is passed on. It needs seconds to keep its work, so this
    one may neither end before it nor kill it.
    """
    interrupted = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the program would inherit
    process = subprocess.Popen(command, env=environment())
    terminated = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, terminated)
