"""fairseq's batches of several shards, from any position; its own iterator goes through one, from the beginning."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fairseq.data.iterators import CountingIterator, EpochBatchIterator

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import FairseqObject


@dataclass(frozen=True)
class DataShard:
    """Part ``index`` of ``parts`` equal parts of an iterator's batches, divided as fairseq divides them for its ranks.

    Each pass over the iterator's data is shuffled anew, in the same order for all parts. The parts are disjoint, and
    together they are the whole data.
    """

    iterator: EpochBatchIterator
    index: int
    parts: int

    @property
    def batches(self) -> int:
        """Number of batches in a pass, equal in all parts: empty batches fill up the last parts."""
        return ceil(len(self.iterator.frozen_batches) / self.parts) - self.iterator.skip_remainder_batch

    def open(self, epoch: int, position: int, fixed: bool) -> CountingIterator:
        """Returns the batches of one pass, from a position on."""
        iterator = self.iterator
        iterator.num_shards, iterator.shard_id = self.parts, self.index
        if hasattr(iterator.dataset, "set_epoch"):
            iterator.dataset.set_epoch(epoch)
        # load_state_dict and next_epoch_itr would go to the next epoch where the last one was left at its end
        return iterator._get_iterator_for_epoch(epoch, True, fix_batches_to_gpus=fixed, offset=position)


class ShardedBatches:
    """Draws a batch of a shard by its number in the shard, which counts on from one pass over the shard to the next.

    Batches that follow each other cost no more than fairseq's own. Another shard, or a position behind batches that
    others have drawn meanwhile, costs the shuffling of a pass.

    Args:
        shards: the shards, of which several may be parts of one iterator.
        fixed: fairseq's ``--fix-batches-to-gpus``: where the data set supports it, a shard keeps its samples in all
            passes.

    Attributes:
        total: number of batches of all shards, without empty ones.

    Raises:
        ConfigurationError: a shard has no batch.
    """

    def __init__(self, shards: Sequence[DataShard], fixed: bool) -> None:
        self.shards, self.fixed = shards, fixed
        self._next = (-1, -1)
        iterators = {id(shard.iterator): shard.iterator for shard in shards}.values()
        self.total = sum(len(iterator.frozen_batches) for iterator in iterators)
        for iterator in iterators:
            iterator.buffer_size = 0  # a buffer's thread would wait for ever where an iterator is left halfway
        fewest = min(min(shard.batches, len(shard.iterator.frozen_batches) // shard.parts) for shard in shards)
        if fewest < 1:
            raise ConfigurationError(
                f"the training set has {self.total} batches, too few for {len(shards)} shards: lower --max-tokens or "
                "--batch-size, or give fewer --shards"
            )

    @property
    def sizes(self) -> list[int]:
        """Number of batches in a pass over each shard."""
        return [shard.batches for shard in self.shards]

    def draw(self, shard: int, number: int) -> FairseqObject:
        """Returns a batch as fairseq's collater makes it; an empty one where a part is filled up."""
        passes, position = divmod(number, self.shards[shard].batches)
        if (shard, number) != self._next or position == 0:
            self._opened = self.shards[shard].open(passes + 1, position, self.fixed)
        self._next = shard, number + 1
        return next(self._opened)


def check_batches_stay(iterator: FairseqObject, cached: bool) -> EpochBatchIterator:
    """Returns the iterator, after checking that it makes its batches once for all epochs.

    Args:
        cached: whether fairseq keeps the iterator for the next epoch.

    Raises:
        ConfigurationError: the batches change from epoch to epoch.
    """
    if not cached or type(iterator) is not EpochBatchIterator or callable(iterator.batch_sampler):
        raise ConfigurationError(
            "--shards: this task makes other batches in each epoch, and a shard has to keep its batches: leave "
            "--shards out"
        )
    return iterator
