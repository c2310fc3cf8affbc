"""How the workers of a script get their server from the launcher, which does not know the script's method.

Worker 0 asks for it in a file, and the launcher answers with the address in another. The server is the launcher's
child, so it outlives a worker 0 that dies.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_REQUEST, _ANSWER = "request.json", "server.json"
_PAUSE = 0.1  # seconds between two looks


@dataclass(frozen=True)
class ServerRequest:
    """What the launcher is to start.

    Attributes:
        module: the server's program.
        run_dir: the run's directory, as an absolute path.
        tls: directory of its certificates, where the script names one; likewise.
    """

    module: str
    run_dir: str
    tls: str | None = None


class Rendezvous:
    """A directory of the launcher's, for its user alone: what is asked for there is started.

    Args:
        directory: made by the launcher; it must have mode 0700.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def request(self, wanted: ServerRequest) -> None:
        """Worker 0 asks for its server; one that was started again asks once more, which changes nothing."""
        _write(self.directory / _REQUEST, json.dumps(asdict(wanted)))

    def requested(self) -> ServerRequest | None:
        """What worker 0 has asked for; None until it has."""
        path = self.directory / _REQUEST
        return ServerRequest(**json.loads(path.read_text())) if path.exists() else None

    def answer(self, address: str) -> None:
        """Tells the workers where the server is."""
        _write(self.directory / _ANSWER, json.dumps(address))

    def wait(self) -> str:
        """The server's address. There is no limit of time: the launcher ends its workers when no server will come."""
        path = self.directory / _ANSWER
        while not path.exists():
            time.sleep(_PAUSE)
        return str(json.loads(path.read_text()))


def _write(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
