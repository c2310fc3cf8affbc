"""Where the workers of a run save their checkpoints, and worker 0 the server's state."""

from pathlib import Path

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import fail

SERVER_STATE = "async_server.pt"  # in the directory of a tag
COMPRESSOR_STATE = "async_compressor.pt"  # likewise


def checkpoint_directory(directory: str, worker: int) -> str:
    """Returns where worker or rank ``worker`` saves: ``directory`` itself for 0, a subdirectory for each other."""
    return directory if worker == 0 else str(Path(directory) / f"worker-{worker}")


def server_state_beside(loaded_from: str, load_dir: str, begins: State | None) -> Path | None:
    """Returns the server's state in worker 0's checkpoint of the tag that this worker has loaded, or None.

    Where worker 0 has another disk, the state is not seen; then the position of a run in the checkpoint tells of it.
    """
    state = Path(load_dir).resolve() / Path(loaded_from).parent.name / SERVER_STATE
    is_elsewhere = begins is not None and not state.parent.exists()
    return state if is_elsewhere or state.exists() else None


def check_tag(directory: str, tag: str | None) -> None:
    """Ends the process with one line if ``directory`` has no checkpoint of the tag, or of that in its file ``latest``:
    DeepSpeed would fail an assertion without a word. Without this file it says so by itself, and loads nothing."""
    latest = Path(directory) / "latest"
    named = latest.read_text().strip() if tag is None and latest.is_file() else tag
    if named is None or (Path(directory) / str(named)).is_dir():
        return
    there = ", ".join(sorted(path.name for path in Path(directory).glob("*") if path.is_dir())) or "none"
    which = f"{named}, which its file {latest.name} names" if tag is None else tag
    fail(f"load_checkpoint: {directory} has no checkpoint {which}; its directories are: {there}; give one as tag=")
