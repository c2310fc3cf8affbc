"""Where the workers of a run save their checkpoints, and worker 0 the server's state."""

import logging
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import fail

logger = logging.getLogger(__name__)

SERVER_STATE = "async_server.pt"  # in the directory of a tag
COMPRESSOR_STATE = "async_compressor.pt"  # likewise


def checkpoint_directory(directory: str, worker: int) -> str:
    """Returns where worker or rank ``worker`` saves: ``directory`` itself for 0, a subdirectory for each other."""
    return directory if worker == 0 else str(Path(directory) / f"worker-{worker}")


def own_checkpoint(directory: str, tag: str | None, worker: int) -> str:
    """Returns the directory with a worker's checkpoint of that tag, or worker 0's if it has saved none."""
    own = checkpoint_directory(directory, worker)
    if worker == 0 or (Path(own) / ("latest" if tag is None else str(tag))).exists():
        return own
    logger.warning("worker %d: no checkpoint in %s, it takes worker 0's", worker, own)
    return directory


def server_state_beside(loaded_from: str, load_dir: str, begins: State | None) -> Path | None:
    """Returns the server's state in worker 0's checkpoint of the tag that this worker has loaded, or None.

    Where worker 0 has another disk, the state is not seen; then the position of a run in the checkpoint tells of it.
    """
    state = Path(load_dir).resolve() / Path(loaded_from).parent.name / SERVER_STATE
    is_elsewhere = begins is not None and not state.parent.exists()
    return state if is_elsewhere or state.exists() else None


def check_files(engine: DeepSpeedEngine, directory: str, tag: str | None, with_optimizer: bool) -> None:
    """Ends the process with one line if a checkpoint is not there, or is ZeRO's of another number of ranks: DeepSpeed
    ends both with a traceback.

    Args:
        engine: which is to load the checkpoint.
        with_optimizer: whether the optimizer's state is to be loaded, too; a model in ZeRO 3 is divided likewise.
    """
    if engine.load_universal_checkpoint():  # which has a file of its own in place of ``latest``, and fits all ranks
        return
    check_tag(directory, tag)
    stage = int(engine.zero_optimization_stage())
    if stage == 0 or stage < 3 and (not with_optimizer or engine.zero_elastic_checkpoint()):
        return
    path, ranks = Path(directory) / str(_named(directory, tag)), dist.get_world_size()
    parts = len(list(path.glob("*zero_pp_rank_*_optim_states.pt")))
    if parts not in (0, ranks):
        remedy = (
            "load_optimizer_states=False" if stage < 3 else "a universal checkpoint, by DeepSpeed's ds_to_universal"
        )
        fail(
            f"load_checkpoint: {path} has ZeRO's parts of {parts} ranks, and this worker has {ranks}: give it as many, "
            f"go on with the run by fairseq-async launch --resume, or give {remedy}"
        )


def check_tag(directory: str, tag: str | None) -> None:
    """Ends the process with one line if ``directory`` has no checkpoint of the tag, or of that in its file ``latest``:
    DeepSpeed would fail an assertion without a word. Without this file it says so by itself, and loads nothing."""
    named = _named(directory, tag)
    if named is None or (Path(directory) / named).is_dir():
        return
    there = ", ".join(sorted(path.name for path in Path(directory).glob("*") if path.is_dir())) or "none"
    which = f"{named}, which its file latest names" if tag is None else tag
    fail(f"load_checkpoint: {directory} has no checkpoint {which}; its directories are: {there}; give one as tag=")


def _named(directory: str, tag: str | None) -> str | None:
    latest = Path(directory) / "latest"
    named = latest.read_text().strip() if tag is None and latest.is_file() else tag
    return None if named is None else str(named)
