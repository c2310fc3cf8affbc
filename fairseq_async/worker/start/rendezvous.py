"""How the workers of a script get their server from the launcher, which does not know the script's method.

Worker 0 asks for the server in one file, and the launcher answers with its address in another. The server is the
launcher's child, so it outlives a worker 0 that dies.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_REQUEST, _ANSWER = "request.json", "server.json"
_PAUSE = 0.1  # seconds between two looks for the answer


@dataclass(frozen=True)
class ServerRequest:
    """The server that the launcher is to start.

    Attributes:
        module: the server's module.
        run_dir: the run's directory, as an absolute path.
        tls: directory of the certificates, as an absolute path; None where the script names none.
        run_dir_option: how the script's user names the run's directory; by default as the launcher spells options.
        standby: whether a second process waits to become the server.
    """

    module: str
    run_dir: str
    tls: str | None = None
    run_dir_option: str = ""
    standby: bool = True


class Rendezvous:
    """The directory through which worker 0 asks the launcher for the server.

    Args:
        directory: made by the launcher. Its mode must be 0700: the launcher starts whatever is asked for there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def request(self, wanted: ServerRequest) -> None:
        """Asks for the server, as worker 0; a worker 0 that was started again asks once more, without effect."""
        _write(self.directory / _REQUEST, json.dumps(asdict(wanted)))

    def requested(self) -> ServerRequest | None:
        """Returns the request of worker 0; None until there is one."""
        path = self.directory / _REQUEST
        return ServerRequest(**json.loads(path.read_text())) if path.exists() else None

    def answer(self, address: str) -> None:
        """Tells the workers where the server is."""
        _write(self.directory / _ANSWER, json.dumps(address))

    def wait(self) -> str:
        """Waits for the server's address. There is no timeout: the launcher ends its workers when no server starts."""
        path = self.directory / _ANSWER
        while not path.exists():
            time.sleep(_PAUSE)
        return str(json.loads(path.read_text()))


def _write(path: Path, text: str) -> None:
    """Writes a file atomically: a reader sees the whole text or no file."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
