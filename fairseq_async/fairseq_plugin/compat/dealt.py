"""fairseq's batches in the order in which the server deals them, where those of a step are divided by speed."""

from collections.abc import Iterator, Sequence
from math import ceil
from types import ModuleType, SimpleNamespace

from fairseq.data.iterators import CountingIterator, EpochBatchIterating, EpochBatchIterator, GroupedIterator
from torch.utils.data import Dataset

from fairseq_async.fairseq_plugin.compat.types import FairseqObject, StateDict
from fairseq_async.worker.batch_reader import BatchReader
from fairseq_async.worker.shards import BatchCounter, BatchKey, DataPosition

DEALT = "dealt"  # key of a position in this order


class DealtEpochs(EpochBatchIterating):
    """Epochs for fairseq's loop, each of which is a pass of all workers together.

    The order is that of a synchronous run: step after step, and in each step the batches of every worker's part of the
    pass (:func:`~fairseq_async.worker.shards.place`). Empty batches fill up the last step of a pass, so that it counts
    as the others do. Workers of equal speed so have the batches of fairseq's own parts, step by step.

    A worker's epoch ends with its last gradient that begins in the pass. Batches whose gradient is not sent, as
    after an overflow in fp16, are left out: those of the following step come in their place.

    Args:
        iterator: fairseq's, over batches that stay the same in all passes.
        position: this worker's position in the order, which moves on as the server deals.
        workers: number of workers that were announced, which is the number of parts.
        micro_batches: number of batches of each part in a step.
        curriculum: number of first passes whose batches are not shuffled.
    """

    def __init__(
        self, iterator: EpochBatchIterator, position: DataPosition, workers: int, micro_batches: int, curriculum: int
    ) -> None:
        self.position, self._micro_batches, self._in_step = position, micro_batches, workers * micro_batches
        self.frozen_batches = range(len(iterator.frozen_batches))  # others read its length only
        self._steps = ceil(len(self.frozen_batches) / self._in_step)
        batches = _Batches(iterator, workers, len(self), curriculum)
        self._counter = BatchCounter(micro_batches, workers)
        self._reader = BatchReader(batches, iterator.num_workers, True, self._counter.following)
        self.epoch, self._pass = self.next_epoch_idx, DealtPass(self)

    def __len__(self) -> int:
        """Number of batches of a worker in an epoch, on average."""
        return self._steps * self._micro_batches

    @property
    def next_epoch_idx(self) -> int:
        """The number of the pass of this worker's next gradient."""
        return self._step // self._steps + 1

    @property
    def _step(self) -> int:
        return (self.position.first_micro_batch or 0) // self._in_step

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> "DealtPass":
        """Begins an epoch and returns its batches, whose order depends on the pass alone."""
        self.epoch, self._pass = self.next_epoch_idx, DealtPass(self)
        return self._pass

    def end_of_epoch(self) -> bool:
        """Whether the epoch that was begun last has no batch left for this worker."""
        return not self._pass.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        """Number of batches of each part of the pass, in the steps before this worker's present one."""
        return self._step % self._steps * self._micro_batches

    def state_dict(self) -> StateDict:
        """Returns the position in the form of fairseq's own iterator, which can go on from it. These epochs go on where
        the server deals."""
        place = {"epoch": self.next_epoch_idx, "iterations_in_epoch": self.iterations_in_epoch}
        return {"version": 2, "shuffle": True, DEALT: True} | place

    def load_state_dict(self, state: StateDict) -> None:
        """Does nothing: the server knows the position."""

    def draw(self) -> Iterator[list[FairseqObject]]:
        """Yields the batches of this worker's gradients, each as a group of one."""
        while True:
            yield [self._reader.read(self._counter.next(self.position))]


class DealtPass(CountingIterator):
    """The batches of a worker in one epoch. Their number is known when the server deals the next pass."""

    def __init__(self, epochs: DealtEpochs) -> None:
        super().__init__(epochs.draw(), start=epochs.iterations_in_epoch, total=len(epochs))
        self._epochs = epochs

    def has_next(self) -> bool:
        return self._epochs.next_epoch_idx == self._epochs.epoch


class _Batches(Dataset[tuple[BatchKey, FairseqObject]]):
    """The batches of all parts by their keys, with empty ones that fill up the last step of each pass.

    Args:
        iterator: see :class:`DealtEpochs`.
        parts: number of parts; each has every so many-th batch of a pass, as fairseq's ranks do.
        length: number of batches of a part in a pass, with empty ones.
        curriculum: see :class:`DealtEpochs`.
    """

    def __init__(self, iterator: EpochBatchIterator, parts: int, length: int, curriculum: int) -> None:
        iterator.num_shards, iterator.shard_id = 1, 0  # so that it orders the batches of all parts
        self._iterator, self._parts, self._length, self._curriculum = iterator, parts, length, curriculum
        self._epoch = 0
        self._order: Sequence[Sequence[int]] = ()

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, FairseqObject]:
        part, number = key
        passes, position = divmod(number, self._length)
        batches, at = self._of_epoch(passes + 1), position * self._parts + part
        samples = [self._iterator.dataset[each] for each in batches[at]] if at < len(batches) else []
        return key, self._iterator.collate_fn(samples) if samples else {}

    def _of_epoch(self, epoch: int) -> Sequence[Sequence[int]]:
        if epoch != self._epoch:
            iterator, self._epoch = self._iterator, epoch
            if hasattr(iterator.dataset, "set_epoch"):
                iterator.dataset.set_epoch(epoch)
            shuffled = epoch > self._curriculum and not iterator.disable_shuffling
            self._order = iterator.ordered_batches(epoch, False, shuffled)
        return self._order


def can_be_dealt(iterator: FairseqObject, cached: bool) -> bool:
    """Whether any worker can draw any batch of an iterator: the batches are the same in all passes, and their order
    does not depend on how they are divided.

    Args:
        cached: whether fairseq keeps the iterator for the next epoch.
    """
    if not cached or type(iterator) is not EpochBatchIterator or callable(iterator.batch_sampler):
        return False
    return not (iterator.grouped_shuffling or getattr(iterator.dataset, "supports_prefetch", False))


def grouped(batches: CountingIterator, size: int, skip_remainder_batch: bool = False) -> CountingIterator:
    """Returns the groups of fairseq's loop. fairseq's own would count them before the server deals."""
    return batches if isinstance(batches, DealtPass) else GroupedIterator(batches, size, skip_remainder_batch)


def with_dealt(iterators: ModuleType) -> SimpleNamespace:
    """Returns ``fairseq.data.iterators`` for fairseq's loop, with :func:`grouped` in place of its own."""
    return SimpleNamespace(**vars(iterators) | {"GroupedIterator": grouped})
