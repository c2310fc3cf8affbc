"""``--shards``: epochs for fairseq's loop, with batches from the shards that the server chooses."""

import os
from collections.abc import Callable, Iterator
from math import ceil

from fairseq.data.iterators import CountingIterator, EpochBatchIterating

from fairseq_async.fairseq_plugin.compat.shards import DataShard, ShardedBatches, check_batches_stay
from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject, StateDict
from fairseq_async.worker.shards import BatchCounter, DataPosition


class ShardedEpochs(EpochBatchIterating):
    """Epochs for fairseq's loop: each has as many batches as a worker's part of a pass over all shards, in whole steps.

    An epoch does not say which batches these are: they are drawn at ``position``, which the server moves from shard to
    shard. An epoch only counts, for fairseq's validations and schedules; the server knows how far each shard has been
    drawn.

    Args:
        position: this worker's position in the data; moves on as the worker steps.
        workers: number of workers that share the data.
        update_freq: number of batches in a step.
    """

    def __init__(self, batches: ShardedBatches, position: DataPosition, workers: int, update_freq: int) -> None:
        self.batches, self.position = batches, position
        self.epoch = 1
        self.frozen_batches = range(batches.total)  # others read its length only
        self._length = ceil(batches.total / (workers * update_freq)) * update_freq
        self._counter = BatchCounter(update_freq, workers)
        self._start = 0  # where the next epoch begins, in batches
        self._drawn: CountingIterator | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def next_epoch_idx(self) -> int:
        """The number of the epoch that the next call of :meth:`next_epoch_itr` begins."""
        return self.epoch + (self._drawn is not None and self.end_of_epoch())

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> CountingIterator:
        """Begins an epoch and returns its batches; the order in which a shard is drawn does not depend on it."""
        self.epoch = self.next_epoch_idx
        self._drawn, self._start = CountingIterator(self._draw(), start=self._start, total=len(self)), 0
        return self._drawn

    def end_of_epoch(self) -> bool:
        """Whether the epoch that was begun last has no batch left."""
        return self._drawn is not None and not self._drawn.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        """Number of batches of this epoch that were drawn."""
        return self._start if self._drawn is None else int(self._drawn.n)

    def state_dict(self) -> StateDict:
        """Returns the state in the form of fairseq's own iterator, without the positions in the shards."""
        ended = self.end_of_epoch()
        place = {"epoch": self.epoch + ended, "iterations_in_epoch": 0 if ended else self.iterations_in_epoch}
        return {"version": 2, "shuffle": True} | place

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from a state of :meth:`state_dict`, which may be of another number of workers."""
        self.epoch, self._start, self._drawn = state["epoch"], state["iterations_in_epoch"], None
        if self._start >= len(self):
            self.epoch, self._start = self.epoch + 1, 0

    def _draw(self) -> Iterator[FairseqObject]:
        while True:
            yield self.batches.draw(*self._counter.next(self.position))


def sharded_batches(
    make: Callable[[int], FairseqObject], task: FairseqObject, cfg: FairseqConfig, shards: int
) -> ShardedBatches:
    """Returns the shards of the training set: the directories of ``DATA:DATA:…``, or equal parts of the one directory.

    Several directories each have a text of their own.

    Args:
        make: makes fairseq's iterator over the whole training set for an epoch; each epoch takes the next directory.
        shards: number of shards, which is the number of directories if there are several.

    Raises:
        ConfigurationError: the batches of a shard would change, or a shard would have none.
    """
    directories = len(directories_of(cfg))
    iterators = [_of_epoch(make, task, cfg, number + 1) for number in range(directories)]
    if directories > 1:
        parts = [DataShard(iterator, 0, 1) for iterator in iterators]
    else:
        parts = [DataShard(iterators[0], number, shards) for number in range(shards)]
    return ShardedBatches(parts, cfg.distributed_training.fix_batches_to_gpus)


def directories_of(cfg: FairseqConfig) -> list[str]:
    """Returns the directories of the data, of which fairseq takes another in each epoch."""
    return (getattr(cfg.task, "data", None) or "").split(os.pathsep)


def _of_epoch(
    make: Callable[[int], FairseqObject], task: FairseqObject, cfg: FairseqConfig, epoch: int
) -> FairseqObject:
    iterator = make(epoch)
    cached = task.dataset_to_epoch_iter.get(task.dataset(cfg.dataset.train_subset)) is iterator
    return check_batches_stay(iterator, cached)
