"""``fairseq-async``: the command line."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fairseq_async.errors import AsyncError, ConfigurationError
from fairseq_async.launch import command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def description() -> None:
    """Asynchronous training of Transformers."""


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    worker_command: Annotated[list[str], typer.Argument(metavar="-- fairseq-train ...", show_default=False)],
    workers: Annotated[int, typer.Option(min=1, help="Number of workers on this machine.")],
    slowdown: Annotated[
        str, typer.Option(help="Make workers slower, for experiments: 1,4 makes worker 1 four times slower.")
    ] = "",
    max_restarts: Annotated[int, typer.Option(min=0, help="How often each worker that dies is started again.")] = 3,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The server's port; 0 takes a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="The server's address, for workers that join from other machines; 0.0.0.0 is all.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's secret, which --host needs; only you may read it.")
    ] = None,
) -> None:
    """Train one job with several workers on this machine."""
    from fairseq_async.launch.launcher import Launcher
    from fairseq_async.launch.synchronous import GroupLauncher

    given = command.WorkerCommand(worker_command)
    launcher = GroupLauncher if given.synchronous else Launcher
    launcher(given, workers, _factors(slowdown), max_restarts, port, host, token_file).run()


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", show_default=False)],
    worker_command: Annotated[list[str], typer.Argument(metavar="-- fairseq-train ...", show_default=False)],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The run's secret: on the server's machine .token in its --save-dir.")
    ],
) -> None:
    """Become one more worker of a run that is going on, with the same command as its other workers."""
    from fairseq_async.launch.join import join as begin

    begin(address, worker_command, token_file)


@app.command("user-dir")
def user_dir() -> None:
    """Print the directory for fairseq's --user-dir."""
    print(command.user_dir())


def _factors(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ConfigurationError(f"--slowdown {text}: numbers with commas between them, as in 1,4") from error


def main() -> None:
    try:
        app()
    except AsyncError as error:
        print(f"fairseq-async: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
