"""A script of the user's own as the command of the workers: it knows its method, and the launcher does not."""

import os
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.programs import find_program
from fairseq_async.worker.rendezvous import Rendezvous


class ScriptCommand:
    """Any program that joins a run by ``fairseq_async``, such as ``python train.py --deepspeed ...``.

    Args:
        arguments: the whole command.
        directory: private to the user: logs go there until the script has said where its run's files go.
        resumes: a run that was interrupted in the same directory is to go on.

    Attributes:
        name: of the script, for errors.
        rendezvous: where worker 0 asks for the server.

    Raises:
        ConfigurationError: there is no such program or script.
    """

    on_cpu, server, tls = False, "", None  # its script says where it wants certificates

    def __init__(self, arguments: list[str], directory: Path, resumes: bool) -> None:
        self.program, self.arguments = find_program(arguments[0]), arguments[1:]
        self.given, self.run_dir, self.resumes = arguments, directory, resumes
        self.rendezvous = Rendezvous(directory)
        script = next((each for each in self.arguments if not each.startswith("-")), "")
        self.name = script or arguments[0]
        if Path(self.program).name.startswith("python") and script.endswith(".py") and not os.path.exists(script):
            raise ConfigurationError(f"{script}: no such script; the path is relative to {os.getcwd()}")

    def check_inputs(self) -> None:
        """The script checks its own."""

    def line(self, address: str | None) -> list[str]:
        """The whole command of a worker, which finds the server by its environment."""
        return [self.program, *self.arguments]
