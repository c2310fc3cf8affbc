"""Starts the command of ``fairseq-async launch``: workers with a server, the ranks of a group, or a script."""

import os
import shutil
import tempfile
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.options import LaunchOptions


def launch_fairseq(arguments: list[str], options: LaunchOptions) -> None:
    """Runs ``fairseq-train`` with a method of ours to the end.

    Raises:
        AsyncError: the command has a mistake, or the run failed.
    """
    command = WorkerCommand(arguments, options.workers, ranks=options.ranks)
    if options.resume:
        raise ConfigurationError(
            "--resume is for scripts: leave it out; an interrupted fairseq-train continues without it"
        )
    if not command.synchronous:
        return _launch(command, options)
    if options.asynchronous:
        raise ConfigurationError(
            f"{' and '.join(options.asynchronous)}: the ranks of a synchronous method wait for each other and have no "
            "server; leave it out"
        )
    command.check_inputs()
    from fairseq_async.launch.synchronous import GroupLauncher  # start-up time

    GroupLauncher(command, options.workers, options.port).run()


def launch_script(arguments: list[str], options: LaunchOptions) -> None:
    """Runs a script to the end. Its logs begin in a temporary directory, which is removed at the end.

    Raises:
        AsyncError: the command has a mistake, or the run failed.
    """
    # In the working directory, usually on the disk of the run's directory: open logs can be moved on one disk only.
    where = os.getcwd() if os.access(os.getcwd(), os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=".fairseq-async-", dir=where))
    try:
        _launch(ScriptCommand(arguments, directory, options.resume), options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _launch(command: WorkerCommand | ScriptCommand, options: LaunchOptions) -> None:
    options.check()
    command.check_inputs()
    from fairseq_async.launch.launcher import Launcher  # start-up time

    Launcher(command, options).run()
