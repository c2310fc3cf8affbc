"""``--shards``: fairseq's epochs, of batches from the shards that the server chooses."""

import os
from collections.abc import Callable, Iterator
from math import ceil

from fairseq.data.iterators import CountingIterator, EpochBatchIterating

from fairseq_async.fairseq_plugin.compat.shards import Shard, ShardedBatches, check_batches_stay
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.worker.shards import BatchCounter, DataPosition


class ShardedEpochs(EpochBatchIterating):
    """Epochs for fairseq's loop: each is a worker's part of a pass over all shards, in whole steps.

    Where the worker draws is not for the epoch to say: its batches are those of ``position``, which the server moves
    from shard to shard. So an epoch counts, for fairseq's validations and schedules, and the server knows how far each
    shard has been drawn.

    Args:
        position: of this worker; moves on as it steps.
        workers: that share the data.
        update_freq: batches of a step.
    """

    def __init__(self, batches: ShardedBatches, position: DataPosition, workers: int, update_freq: int) -> None:
        self.batches, self.position = batches, position
        self.epoch = 1
        self.frozen_batches = range(batches.total)  # of which others take the length
        self._length = ceil(batches.total / (workers * update_freq)) * update_freq
        self._counter = BatchCounter(update_freq)
        self._start = 0  # of the next epoch that is begun
        self._drawn: CountingIterator | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def next_epoch_idx(self) -> int:
        """The epoch that the next :meth:`next_epoch_itr` begins."""
        return self.epoch + (self._drawn is not None and self.end_of_epoch())

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> CountingIterator:
        """The batches of an epoch; in which order each shard is drawn does not depend on it."""
        self.epoch = self.next_epoch_idx
        self._drawn, self._start = CountingIterator(self._draw(), start=self._start, total=len(self)), 0
        return self._drawn

    def end_of_epoch(self) -> bool:
        """Whether the epoch that was begun last has no batch left."""
        return self._drawn is not None and not self._drawn.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of this epoch that were drawn."""
        return self._start if self._drawn is None else int(self._drawn.n)

    def state_dict(self) -> StateDict:
        """As fairseq's own iterator; it does not say where the shards are."""
        ended = self.end_of_epoch()
        place = {"epoch": self.epoch + ended, "iterations_in_epoch": 0 if ended else self.iterations_in_epoch}
        return {"version": 2, "shuffle": True} | place

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from :meth:`state_dict`, which may be of another number of workers."""
        self.epoch, self._start, self._drawn = state["epoch"], state["iterations_in_epoch"], None
        if self._start >= len(self):
            self.epoch, self._start = self.epoch + 1, 0

    def _draw(self) -> Iterator[FairseqObject]:
        while True:
            number = self._counter.next(self.position)
            yield self.batches.draw(self.position.shard or 0, number)


def sharded_batches(
    make: Callable[[int], FairseqObject], task: FairseqObject, cfg: FairseqConfig, shards: int
) -> ShardedBatches:
    """The shards of the training set: the directories of ``DATA:DATA:…``, each with a text of its own, or equal parts
    of the one directory.

    Args:
        make: fairseq's iterator over the whole training set, as it makes it for an epoch: each takes the next
            directory.
        shards: how many; the number of the directories, if there are several.

    Raises:
        ConfigurationError: the batches of a shard would change, or a shard would have none.
    """
    directories = len(directories_of(cfg))
    iterators = [_of_epoch(make, task, cfg, number + 1) for number in range(directories)]
    if directories > 1:
        parts = [Shard(iterator, 0, 1) for iterator in iterators]
    else:
        parts = [Shard(iterators[0], number, shards) for number in range(shards)]
    return ShardedBatches(parts, cfg.distributed_training.fix_batches_to_gpus)


def directories_of(cfg: FairseqConfig) -> list[str]:
    """The directories of the data, of which fairseq takes another in each epoch."""
    return (getattr(cfg.task, "data", None) or "").split(os.pathsep)


def _of_epoch(
    make: Callable[[int], FairseqObject], task: FairseqObject, cfg: FairseqConfig, epoch: int
) -> FairseqObject:
    iterator = make(epoch)
    cached = task.dataset_to_epoch_iter.get(task.dataset(cfg.dataset.train_subset)) is iterator
    return check_batches_stay(iterator, cached)
