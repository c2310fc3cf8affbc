"""Files with a server's state: only the run's user can read them, and only the server chooses their names."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError, disk_error


def restored_path(run_dir: Path) -> Path:
    """Returns where worker 0 puts the state that it brings a new server."""
    return run_dir.resolve() / ".state-restored.pt"


def saved_path(run_dir: Path, worker: int) -> Path:
    """Returns where the server writes its state for this worker, which takes the file away."""
    return run_dir.resolve() / f".state-{worker}.pt"


def meeting_path(run_dir: Path) -> Path:
    """Returns the file from which the workers of a job read the address of its server."""
    return run_dir / ".server.json"


def ending_path(run_dir: Path) -> Path:
    """Returns the file that exists while an interrupted server writes its last snapshot."""
    return run_dir / ".ending"


def private(path: str, flags: int) -> int:
    """Opens a file that no other user can read; an opener for :func:`open`."""
    return os.open(path, flags, 0o600)


def write_state(path: Path, state: State) -> None:
    """Writes a state into a new file, in place of any file of this name.

    Raises:
        RefusedError: the file cannot be written.
    """
    try:
        path.unlink(missing_ok=True)
        with open(path, "xb", opener=private) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # half of a state, which would keep the last room of a full disk
        raise RefusedError(f"the server's state cannot be written to {path}: {disk_error(error)}") from error


def read_state(path: Path) -> State:
    """Reads the server's state from a regular file; it follows no link, and waits for no pipe.

    Raises:
        RefusedError: the state cannot be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is not a regular file")
            state: State = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the broken bytes lead it to
        raise RefusedError(f"{path}: the server's state cannot be read: {error}") from error
    return state


@contextmanager
def placed(state: Path, inbox: Path) -> Iterator[None]:
    """Keeps, inside this context, a copy of a state's file where the server looks for it.

    Raises:
        RefusedError: the copy cannot be written.
    """
    try:
        inbox.unlink(missing_ok=True)
        with open(state, "rb") as source, open(inbox, "xb", opener=private) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise RefusedError(f"the server's state cannot be written to {inbox}: {error}") from error
    try:
        yield
    finally:
        inbox.unlink(missing_ok=True)
