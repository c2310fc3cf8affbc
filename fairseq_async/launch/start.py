"""Starts the command of ``fairseq-async launch``: workers with a server, the ranks of a group, or a script."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from math import inf
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.options.addresses import IPV4_ONLY, LOOPBACK, is_ipv6, is_loopback


@dataclass(frozen=True)
class Launch:
    """The launcher's own flags; see :class:`~fairseq_async.launch.launcher.Launcher`.

    Attributes:
        asynchronous: names of the given flags that apply only to runs with a server.
    """

    workers: int
    ranks: list[int]
    slowdown: list[float]
    max_restarts: int
    port: int
    host: str
    token_file: Path | None
    tls: Path | None
    resume: bool
    asynchronous: list[str]

    def check(self) -> None:
        """Checks the flags against each other.

        Raises:
            ConfigurationError: flags do not fit together, the host is no IPv4 host, or a slowdown is below 1.
        """
        if is_ipv6(self.host):
            raise ConfigurationError(f"--host {self.host}: {IPV4_ONLY}")
        if self.host != LOOPBACK and not self.token_file and not is_loopback(self.host):
            raise ConfigurationError(
                f"--host {self.host}: other machines can reach this address; give a secret with --token-file FILE, "
                "made with: (umask 077; openssl rand -hex 16 > FILE)"
            )
        if self.slowdown and len(self.slowdown) != self.workers:
            raise ConfigurationError(
                f"--slowdown has {len(self.slowdown)} factors for {self.workers} workers; give one for each"
            )
        if not all(1 <= factor < inf for factor in self.slowdown):
            raise ConfigurationError("--slowdown: a factor must be a number of at least 1")


def launch_fairseq(arguments: list[str], options: Launch) -> None:
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


def launch_script(arguments: list[str], options: Launch) -> None:
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


def _launch(command: WorkerCommand | ScriptCommand, options: Launch) -> None:
    options.check()
    command.check_inputs()
    from fairseq_async.launch.launcher import Launcher  # start-up time

    Launcher(
        command,
        options.workers,
        options.slowdown,
        options.max_restarts,
        port=options.port,
        host=options.host,
        token_file=options.token_file,
        tls=options.tls,
        ranks=options.ranks,
    ).run()
