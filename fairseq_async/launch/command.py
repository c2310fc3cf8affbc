"""The worker's command line: what of it the launcher must know, and what it adds."""

import os
import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.methods import SYNCHRONOUS
from fairseq_async.option_flags import check_command

# the module that is the server of each --optimizer
SERVERS = {
    "hybrid_async": "fairseq_async.fairseq_server",
    "local_sgd": "fairseq_async.server.local_sgd_main",
}


def user_dir() -> str:
    """What ``fairseq-train --user-dir`` is to be given."""
    return str(Path(__file__).parents[1])


class WorkerCommand:
    """One ``fairseq-train`` command, the same for every worker.

    Args:
        workers: how many will run it; None where that is not known.

    Attributes:
        synchronous: the workers are the ranks of one data-parallel group, and there is no server.
        server: the module that is the server of the others.

    Raises:
        ConfigurationError: no such program, another optimizer, a flag that the launcher gives itself, or options of the
            method that cannot work.
    """

    def __init__(self, arguments: list[str], workers: int | None = None) -> None:
        if not arguments:
            raise ConfigurationError("nothing to launch; give the command after --, as in: -- fairseq-train DATA ...")
        self.program = find_program(arguments[0])
        self.arguments = arguments[1:]
        given = _parser().parse_known_args(self.arguments)[0]
        if given.optimizer not in (*SERVERS, *SYNCHRONOUS):
            raise ConfigurationError(
                f"--optimizer {given.optimizer or '(missing)'}: launch runs --optimizer "
                f"{' or '.join((*SERVERS, *SYNCHRONOUS))}; name yours with --inner-optimizer"
            )
        if given.server:
            raise ConfigurationError("--server: launch starts its own server; leave the flag out")
        check_command(given.optimizer, self.arguments, workers)
        self.synchronous = given.optimizer in SYNCHRONOUS
        self.server = SERVERS.get(given.optimizer, "")
        self.run_dir = Path(given.run_dir or given.save_dir)
        self.on_cpu = given.cpu
        self._has_user_dir = given.user_dir is not None
        self._has_world_size = given.distributed_world_size is not None

    def line(self, address: str | None) -> list[str]:
        """The whole command of a worker of the server at ``address``; None for a rank, or a worker that knows it."""
        added = [] if self._has_user_dir else ["--user-dir", user_dir()]
        if self.synchronous:
            return [self.program, *self.arguments, *added]
        if not self._has_world_size:
            added += ["--distributed-world-size", "1"]
        return [self.program, *self.arguments, *added, *(["--server", address] if address else [])]


def find_program(program: str) -> str:
    """The path of a program, in PATH or beside this Python.

    Raises:
        ConfigurationError: there is none.
    """
    beside = os.path.dirname(sys.executable)
    found = shutil.which(program) or shutil.which(program, path=beside)
    if found is None:
        raise ConfigurationError(f"{program}: no such program; is fairseq installed in this environment?")
    return found


def _parser() -> ArgumentParser:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--optimizer", "--server", "--run-dir", "--user-dir", "--distributed-world-size"):
        parser.add_argument(flag)
    parser.add_argument("--save-dir", default="checkpoints")  # fairseq's default
    parser.add_argument("--cpu", action="store_true")
    return parser
