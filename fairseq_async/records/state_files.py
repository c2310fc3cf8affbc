"""Files with a server's state: only the run's user can read them, and only the server chooses their names."""

import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import BrokenFileError, RefusedError, first_line, is_scarcity, why_not_written

_Value = TypeVar("_Value")
_MARK = b"\nCRC32  "  # between a state, which torch reads to its own end, and the checksum behind it
_CHECKSUM = len(_MARK) + 8  # bytes of both
_PIECE = 1 << 22  # bytes that are read at once


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
        why = why_not_written(error, path.parent)
        raise RefusedError(f"the server's state cannot be written to {path}: {why}") from error


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


class _Summed:
    """A file for :func:`torch.save` that counts the checksum of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.checksum = file, 0
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def save_checked(state: State, file: BinaryIO) -> None:
    """Writes a state with a checksum behind it, a CRC-32 over all bytes; raises what :func:`torch.save` raises."""
    summed = _Summed(file)
    torch.save(state, summed)  # type: ignore[arg-type]  # it writes and flushes, nothing else
    file.write(_MARK + b"%08x" % summed.checksum)


def load_checked(path: Path, mmap: bool = False) -> State:
    """Reads what :func:`save_checked` has written, or :func:`torch.save`, whose files have no checksum.

    Args:
        mmap: map the tensors into memory, so that they are read when they are used.

    Raises:
        BrokenFileError: the content is not what was written, or not of this format.
        OSError, MemoryError, RuntimeError: it cannot be read now (:func:`~fairseq_async.errors.is_scarcity`).
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # without waiting for a pipe's writer
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BrokenFileError("it is not a regular file")
        _check(file)
        try:
            state: State = torch.load(path if mmap else file, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises whatever broken bytes lead it to
            if is_scarcity(error):
                raise
            raise BrokenFileError(first_line(error)) from error
    return state


def _check(file: BinaryIO) -> None:
    """Compares a file with the checksum at its end, if it has one; the file is then at its beginning."""
    left, checksum = max(0, os.fstat(file.fileno()).st_size - _CHECKSUM), 0
    file.seek(left)
    mark, given = file.read(len(_MARK)), file.read()
    file.seek(0)
    if mark != _MARK:
        return
    while left and (piece := file.read(min(_PIECE, left))):
        checksum, left = zlib.crc32(piece, checksum), left - len(piece)
    file.seek(0)
    if given != b"%08x" % checksum:
        raise BrokenFileError("its bytes do not match its checksum")


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
        why = why_not_written(error, inbox.parent)
        raise RefusedError(f"the server's state cannot be written to {inbox}: {why}") from error
    try:
        yield
    finally:
        inbox.unlink(missing_ok=True)


def moved(state: _Value, device: torch.device) -> _Value:
    """Returns a state with its tensors on the device. Those that are there already are the same ones."""
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}  # type: ignore[return-value]
    if isinstance(state, list | tuple):
        return type(state)(moved(value, device) for value in state)
    return state.to(device) if isinstance(state, Tensor) else state  # type: ignore[return-value]
