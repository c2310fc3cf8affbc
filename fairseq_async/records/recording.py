"""Files of a recording that a replay reads: the first state, and vectors that it cannot compute."""

import zlib
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.records.state_files import private

START = "start.pt"


def checksum(flat: Tensor) -> str:
    """Returns the CRC-32 of the bytes of a flat contiguous tensor: equal for equal bits. About 0.4 s for a gigabyte."""
    return f"{zlib.crc32(flat.detach().cpu().numpy().data):08x}"


def merge_path(run_dir: Path, version: int) -> Path:
    """Returns where a recorded region keeps the global server's parameters whose merge has made this version."""
    return run_dir / "merges" / f"version-{version:012d}.pt"


def update_path(run_dir: Path, worker: int, sequence: int) -> Path:
    """Returns where a recorded global server keeps an update of a region."""
    return run_dir / "updates" / f"region-{worker}-{sequence:012d}.pt"


def record_vector(path: Path, vector: Tensor) -> None:
    """Writes a vector that a replay cannot compute; 4 bytes a value."""
    path.parent.mkdir(exist_ok=True)
    try:
        with open(path, "wb", opener=private) as file:
            torch.save(vector.clone(), file)  # torch.save writes the whole storage of a view
    except BaseException:
        path.unlink(missing_ok=True)  # a partial file takes room that others need
        raise


def load_recorded(path: Path, what: str) -> object:
    """Loads a file of a recording with torch; what is in it is for the caller to check.

    Args:
        what: says in an error what the file is.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        why = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:100]}"
        raise ConfigurationError(f"{path}, {what}, cannot be read: {why}") from error


def read_vector(path: Path, size: int) -> Tensor:
    """Reads a vector that :func:`record_vector` has written.

    Raises:
        ConfigurationError: the file cannot be read, or is not a vector of this size.
    """
    vector = load_recorded(path, "which a replay needs")
    if not isinstance(vector, Tensor) or vector.shape != (size,) or vector.dtype != torch.float32:
        raise ConfigurationError(f"{path}: not {size} values in fp32")
    return vector
