"""A user's own script as the command of the workers; its method is known to the script alone, not to the launcher."""

import os
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.programs import find_program
from fairseq_async.worker.start.rendezvous import Rendezvous


class ScriptCommand:
    """Any program that joins a run through ``fairseq_async``, such as ``python train.py --deepspeed ...``.

    Args:
        arguments: the whole command.
        directory: directory private to the user; logs go there until the script has told its run's directory.
        resumes: whether to go on with an interrupted run in the same directory.

    Attributes:
        name: name of the script, for errors.
        rendezvous: the directory in which worker 0 asks for the server.

    Raises:
        ConfigurationError: there is no such program or script.
    """

    on_cpu, synchronous = False, False
    server, tls, no_standby = "", None, False  # the script itself names its server and certificates when it asks

    def __init__(self, arguments: list[str], directory: Path, resumes: bool) -> None:
        self.program, self.arguments = find_program(arguments[0]), arguments[1:]
        self.given, self.run_dir, self.resumes = arguments, directory, resumes
        self.rendezvous = Rendezvous(directory)
        script = next((each for each in self.arguments if not each.startswith("-")), "")
        self.name = script or arguments[0]
        if Path(self.program).name.startswith("python") and script.endswith(".py") and not os.path.exists(script):
            raise ConfigurationError(f"{script}: no such script; the path is relative to {os.getcwd()}")

    def check_inputs(self) -> None:
        """Does nothing: the script checks its own inputs."""

    def line(self, address: str | None) -> list[str]:
        """Returns the whole command of a worker, which finds the server through its environment."""
        return [self.program, *self.arguments]
