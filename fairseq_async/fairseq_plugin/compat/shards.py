"""fairseq's batches of a shard, from any position: its own iterator goes through one part, from its beginning."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fairseq.data.iterators import CountingIterator, EpochBatchIterator

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.types import FairseqObject


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of the ``parts`` of an iterator's batches, divided as fairseq divides them for its ranks.

    Each pass over the iterator's data is shuffled anew, the same for all parts, which are disjoint and together whole.
    """

    iterator: EpochBatchIterator
    index: int
    parts: int

    @property
    def batches(self) -> int:
        """Batches of a pass: as many in each part, with empty ones that fill the last ones up."""
        return ceil(len(self.iterator.frozen_batches) / self.parts) - self.iterator.skip_remainder_batch

    def open(self, epoch: int, position: int, fixed: bool) -> CountingIterator:
        """The batches of one pass from a position on."""
        iterator = self.iterator
        iterator.num_shards, iterator.shard_id = self.parts, self.index
        if hasattr(iterator.dataset, "set_epoch"):
            iterator.dataset.set_epoch(epoch)
        # load_state_dict and next_epoch_itr would go to the next epoch where the last one was left at its end
        return iterator._get_iterator_for_epoch(epoch, True, fix_batches_to_gpus=fixed, offset=position)


class ShardedBatches:
    """The batches of the shards, each by its number in its shard, passes on end.

    Batches that follow each other cost nothing more than fairseq's own; another shard, or a position where others have
    drawn meanwhile, costs the shuffling of a pass.

    Args:
        shards: several may be parts of one iterator.
        fixed: fairseq's ``--fix-batches-to-gpus``: where the data set supports it, a shard keeps its samples in all
            passes.

    Attributes:
        total: batches of all shards, without empty ones.

    Raises:
        ConfigurationError: a shard has no batch.
    """

    def __init__(self, shards: Sequence[Shard], fixed: bool) -> None:
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
        """Batches of a pass of each shard."""
        return [shard.batches for shard in self.shards]

    def draw(self, shard: int, number: int) -> FairseqObject:
        """A batch, as fairseq's collater makes it; an empty one where a part is filled up."""
        passes, position = divmod(number, self.shards[shard].batches)
        if (shard, number) != self._next or position == 0:
            self._opened = self.shards[shard].open(passes + 1, position, self.fixed)
        self._next = shard, number + 1
        return next(self._opened)


def check_batches_stay(iterator: FairseqObject, cached: bool) -> EpochBatchIterator:
    """The iterator, if it makes its batches once, for all epochs.

    Args:
        cached: whether fairseq keeps it for the next epoch.

    Raises:
        ConfigurationError: the batches change from epoch to epoch.
    """
    if not cached or type(iterator) is not EpochBatchIterator or callable(iterator.batch_sampler):
        raise ConfigurationError(
            "--shards: this task makes other batches in each epoch, so that a shard would be nothing fixed: "
            "leave --shards out"
        )
    return iterator
