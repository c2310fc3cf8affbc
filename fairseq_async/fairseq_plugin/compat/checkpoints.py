"""fairseq's checkpoints under torch 2.6 and later, and in runs where every worker is its own master to fairseq."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, StateDict

_RANKS = "data_parallel_world_size"  # a key of a checkpoint's extra state


def trust_plain_data() -> None:
    """Lets torch load what plain fairseq's checkpoints hold besides tensors: ``argparse.Namespace``, and with
    ``--eval-bleu`` arrays of NumPy. Both are data.

    Since 2.6 torch loads only types that it trusts.
    """
    makers: list[Any] = [value.__reduce__()[0] for value in (np.zeros(1), np.float64(0))]
    kinds = {type(np.dtype(name)) for name in ("int64", "float64", "float32")}
    torch.serialization.add_safe_globals([Namespace, np.ndarray, np.dtype, *makers, *kinds])


def plain_values(value: object) -> Any:
    """Returns the value without NumPy's types, which ``--eval-bleu`` brings: plain fairseq could not load the file."""
    match value:
        case np.ndarray() | np.generic():
            return value.tolist()
        case dict():
            return {key: plain_values(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(plain_values, value))
    return value


def plain_config(cfg: FairseqConfig) -> StateDict:
    """Returns a configuration as dictionaries and lists, for our checkpoints.

    fairseq would write its Namespaces. Plain fairseq, which does not trust them, could not load that file.
    """
    container = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): vars(value) if isinstance(value, Namespace) else value for key, value in container.items()}


@contextmanager
def checkpoint_errors(filename: str) -> Iterator[None]:
    """Turns the errors of loading a checkpoint into errors of one line.

    fairseq fails an assertion if a checkpoint is of another optimizer; torch raises if it cannot read the file.
    """
    try:
        yield
    except AssertionError as error:
        raise ConfigurationError(f"{filename}: {error}") from error
    except Exception as error:  # torch raises whatever the broken bytes lead it to
        if not _is_raised_by_loading(error):
            raise
        raise ConfigurationError(
            f"{filename} is no checkpoint that can be read: it is cut, or another program's; give another "
            "--restore-file or --finetune-from-model, or remove it"
        ) from error


def of_another_optimizer(name: str) -> ConfigurationError:
    """Returns the error for a checkpoint without the state of this method, which fairseq may not notice.

    fairseq compares the names of optimizers. Under ``local_sgd`` that is the inner optimizer's, and of half-precision
    models it is the same for all.
    """
    return ConfigurationError(
        f"the checkpoint is of another optimizer than --optimizer {name}: to begin with its parameters, give "
        "--reset-optimizer --reset-dataloader --reset-meters, or --finetune-from-model FILE"
    )


def _is_raised_by_loading(error: Exception) -> bool:
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == torch.serialization.__name__ for frame in frames)


def load_on_every_rank(cfg: FairseqConfig) -> None:
    """Makes each rank read the checkpoint itself.

    By default rank 0 sends the others what it has read, pickled, and torch refuses to load that.
    """
    cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True


def leave_directory_check_to_worker_0() -> None:
    """Keeps this worker from testing whether checkpoints can be written.

    fairseq tests that by creating and removing a file of one name: workers that do it at once remove each other's.
    """
    checkpoint_utils.verify_checkpoint_directory = _no_check


def _no_check(save_dir: str) -> None:
    pass


def make_plain(checkpoint: StateDict, given: StateDict, ranks: int) -> StateDict:
    """Returns fairseq's checkpoint in types that torch.load trusts, with the number of ranks that its position is of.

    Args:
        given: the configuration, from :func:`plain_config`.
    """
    return checkpoint | {"cfg": given, "extra_state": plain_values(checkpoint["extra_state"]) | {_RANKS: ranks}}


def check_workers(extra_state: StateDict, workers: int, filename: str, what: str = "workers") -> None:
    """Checks that the positions in a checkpoint are of a run whose workers had the same parts of the data.

    Args:
        workers: number of parts of the data, one for each rank of a worker.
        what: the name of what has a part, for the message.

    Raises:
        ConfigurationError: that run had another number of workers.
    """
    within_epoch = extra_state.get("train_iterator", {}).get("iterations_in_epoch", 0) > 0
    before = extra_state.get(_RANKS) or (_ranks_of_plain_fairseq(filename) if within_epoch else workers)
    if before != workers:
        raise ConfigurationError(
            f"{filename} is of a run of {before} {what}, and this one has {workers}, each with another part of the "
            f"data: give --reset-dataloader, or start {before} {what}"
        )


def _ranks_of_plain_fairseq(filename: str) -> int:
    """Reads from a checkpoint of plain fairseq, whose extra state does not say it, how many ranks divided its data."""
    ranks: int = checkpoint_utils.load_checkpoint_to_cpu(filename)["cfg"]["distributed_training"][
        "distributed_world_size"
    ]
    return ranks


def rescale_position(extra_state: StateDict, ranks: int) -> None:
    """Converts the position in the data to that of a run with ``ranks`` ranks.

    fairseq's position counts the batches of one rank. A run with another number of ranks would go on elsewhere.
    """
    if _RANKS in extra_state:
        position = extra_state["train_iterator"]
        position["iterations_in_epoch"] *= extra_state[_RANKS]
        position["iterations_in_epoch"] //= ranks
