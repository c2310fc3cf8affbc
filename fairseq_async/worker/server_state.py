"""Transfers the server's whole state to and from a checkpoint, as a file with types that torch loads safely."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError
from fairseq_async.records.state_files import write_state
from fairseq_async.worker.connection.server_connection import ServerConnection


def fetch_state(client: ServerConnection, run_dir: Path) -> State:
    """Fetches the server's state, which the server gives to worker 0 only.

    Raises:
        ConfigurationError: this is another worker.
        RefusedError: the state cannot be written.
    """
    if client.worker > 0:
        raise ConfigurationError(
            f"server_parameters() on worker {client.worker}: the server gives its state to worker 0 alone: write if "
            "worker.worker == 0 before it, or call worker.pull() on every worker"
        )
    run_dir.mkdir(parents=True, exist_ok=True)  # the server's run_dir may be another one
    path = run_dir / ".state-for-checkpoint.pt"
    try:
        client.save_state(str(path.resolve()))
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        client.on_any_rank(False)  # the ranks of an island wait here for each other: all have read the file
    finally:
        path.unlink(missing_ok=True)
    client.on_any_rank(False)  # and here: no rank removes the file of the next call
    return state


@contextmanager
def state_file(state: State | Path | None, run_dir: Path) -> Iterator[str | None]:
    """Writes the state to a file that exists within the block, and yields its path; None if there is no state. A state
    that is in a file already stays there.

    Raises:
        RefusedError: the file cannot be written.
    """
    if state is None or isinstance(state, Path):
        yield None if state is None else str(state)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / ".state-of-checkpoint.pt"
    try:
        write_state(path, state)
        yield str(path.resolve())
    finally:
        path.unlink(missing_ok=True)
