"""The file by which the workers of a job on several machines find their server; it is in the run's shared directory."""

import json
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fairseq_async.errors import ConfigurationError, ExchangeError, option
from fairseq_async.options.validation import split_address
from fairseq_async.records.state_files import meeting_path, private

_PAUSE = 0.5  # seconds between two attempts
_CONNECT = 5.0  # seconds for a connection


@dataclass(frozen=True)
class MeetingPlace:
    """Where a job's server is.

    Attributes:
        job: the job that has started the server.
        machine: host name of the server's machine, as the machine itself reports it.
        address: address for workers on other machines.
        near: address for workers on the server's machine.
        token: the run's secret.
    """

    job: str
    machine: str
    address: str
    near: str
    token: str

    @property
    def port(self) -> int:
        """The server's port."""
        return split_address(self.address)[1]

    @property
    def may_be_here(self) -> bool:
        """Whether the server is on this machine, or on another with the same host name, as containers may have."""
        return self.machine == socket.gethostname()


class Meeting:
    """The file in which worker 0 tells the other workers of its job where the server is. It contains the run's secret.

    The file stays only when the job is interrupted. The job that then goes on takes the same token and, on the same
    machine, the same port, so that workers which still wait for the server find it again.

    Args:
        run_dir: the run's directory, on a file system that all machines share.
        job: name of the job; the file of another job is ignored.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self.path, self.job = meeting_path(run_dir), job

    def tell(self, place: MeetingPlace) -> None:
        """Writes the file atomically: a reader sees the whole file or none."""
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        with open(part, "x", opener=private) as file:
            json.dump(asdict(place), file)
        part.replace(self.path)

    def place(self) -> MeetingPlace | None:
        """Reads where the server is; None if worker 0 of this job has not written it.

        Raises:
            ConfigurationError: other users can read the file, or its content is not a place.
        """
        try:
            with self.path.open() as file:
                mode, text = os.fstat(file.fileno()).st_mode, file.read(1 << 16)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.path}: cannot be read: {error}") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigurationError(f"{self.path}: others can read it, and it has the run's secret; remove it")
        try:
            place = MeetingPlace(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{self.path}: does not say where the server is; remove it") from error
        return place if place.job == self.job else None

    def wait(self, seconds: float) -> tuple[str, str]:
        """Waits until the server listens, since the file may be older than the server; returns its address for this
        worker, and the token.

        Raises:
            ExchangeError: no server listens within this time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            place = self.place()
            if place is not None:
                for address in [place.near] * place.may_be_here + [place.address]:
                    if _listens(address):
                        return address, place.token
            time.sleep(_PAUSE)
        raise ExchangeError(
            f"worker 0 has started no server within {seconds:g} s; {self.path} would say where. Is {option('run_dir')} "
            "on a file system that all machines share?"
        )


def wait_until_it_listens(address: str, seconds: float) -> None:
    """Waits until a server listens at an address that is known.

    Raises:
        ExchangeError: no server listens there within this time.
    """
    deadline = time.monotonic() + seconds
    while not _listens(address):
        if time.monotonic() > deadline:
            raise ExchangeError(f"no server at {address} ({option('server')}) within {seconds:g} s")
        time.sleep(_PAUSE)


def _listens(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=_CONNECT).close()
    except OSError:
        return False
    return True
