"""The training data of a ``Trainer``, divided among the workers as torchrun's processes divide it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from fairseq_async.errors import fail
from fairseq_async.pytorch.trainer.follow_run import wrap

Place: TypeAlias = tuple[int, int]  # the number of ranks of all workers together, and this one's among them
_OWN = ("transformers", "accelerate", "deepspeed")  # whose code asks for the worker's own numbers


class Division:
    """Says the run's numbers where training data is divided, and this worker's own everywhere else.

    ``args.world_size`` and ``args.process_index`` are the run's in the code of the user, and in that of transformers
    while the loader of the training data is made, as are those of accelerate. For evaluation, checkpoints and values
    of DeepSpeed, the libraries take each worker for a world of its own.

    Args:
        find: returns this process's place in the run for a ``Trainer``'s data; None where nothing is to be divided. It
            is given None where the numbers are asked for, of which no ``Trainer`` is known.

    Attributes:
        by_script: whether the loader of the training is the script's own, which has asked for the numbers: then no two
            workers may begin with the same batch.
    """

    def __init__(self, find: Callable[[Trainer | None], Place | None]) -> None:
        self._find, self._making, self._was_read, self.by_script = find, False, False, False
        for position, name in enumerate(("world_size", "process_index")):
            own = vars(TrainingArguments)[name].fget
            setattr(TrainingArguments, name, property(partial(self._number, own, position)))
        wrap(Trainer, "get_train_dataloader", self._make)
        wrap(Trainer, "_inner_training_loop", self._train)

    def _number(self, own: Callable[[TrainingArguments], int], position: int, arguments: TrainingArguments) -> int:
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        place = self._find(None) if self._making or asks not in _OWN else None
        if place is None:
            return own(arguments)
        self._was_read |= position == 0
        return place[position]

    def _train(self, original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        """Trains with a loader that may come from a method of a subclass."""
        make = trainer.get_train_dataloader
        checked = partial(self._make, lambda _: make(), trainer, checks=True)
        setattr(trainer, "get_train_dataloader", checked)  # noqa: B010 - mypy assigns to no method
        try:
            return original(trainer, *args, **kwargs)
        finally:
            vars(trainer).pop("get_train_dataloader", None)

    def _make(
        self, original: Callable[[Trainer], DataLoader[Any]], trainer: Trainer, checks: bool = False
    ) -> DataLoader[Any]:
        """Returns the loader of the training data; one of which every worker would draw all of it is an error."""
        place = self._find(trainer)
        if place is None or self._making:
            self._was_read |= self._making  # by the Trainer's own loader, of which a subclass makes another
            return original(trainer)
        read_before = self._was_read  # the data set may have been divided by them
        with self._as_one_of(trainer, *place), _common_seed(trainer.args.seed, place[0]):
            loader = original(trainer)
            has_length(loader)  # a sampler may ask for the numbers here
        if self._find(trainer) is None:  # the data was divided by the worker's number meanwhile
            return original(trainer)
        self.by_script = place[0] > 1 and not isinstance(loader, DataLoaderShard)
        divides = read_before or (self._was_read and not _draws_all(loader, trainer.train_dataset))
        if checks and self.by_script and not divides:
            fail(
                "get_train_dataloader does not divide the data among workers: return self.accelerator.prepare(loader), "
                "or give its sampler num_replicas=self.args.world_size and rank=self.args.process_index"
            )
        return loader

    @contextmanager
    def _as_one_of(self, trainer: Trainer, ranks: int, rank: int) -> Iterator[None]:
        """Within this context, loaders that accelerate prepares draw this rank's part of the data, among all ranks."""
        state, loading = trainer.accelerator.state, trainer.accelerator.dataloader_config
        before = state.num_processes, state.process_index, loading.dispatch_batches
        state.num_processes, state.process_index, self._making = ranks, rank, True
        loading.dispatch_batches = False  # one process cannot read for all: they do not wait
        try:
            yield
        finally:
            state.num_processes, state.process_index, loading.dispatch_batches = before
            self._making = False


def _draws_all(loader: Any, data: Any) -> bool:
    """Whether a pass over the loader is one over all of the data set, as far as lengths show it."""
    batches = loader if getattr(loader, "batch_sampler", None) is None else loader.batch_sampler
    try:
        return loader.dataset is data and len(batches.sampler) >= len(data)
    except (AttributeError, TypeError):  # one that has no sampler, or no length
        return False


@contextmanager
def _common_seed(seed: int, ranks: int) -> Iterator[None]:
    """Within this context, torch's generator is that of all ranks, from which a sampler may draw its seed.

    The ``Trainer`` has seeded it; where it still is as it was then, as it is under torchrun, it is used itself, and so
    is that of a single rank.
    """
    if ranks == 1 or torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()):
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
