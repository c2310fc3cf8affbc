"""The loader that draws a worker's batches from the shards that the server chooses."""

from collections.abc import Callable, Iterator, Sized
from typing import Protocol, TypeAlias

from torch.utils.data import Dataset, default_collate

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.shards import ShardOrder, shard_sizes

Collate: TypeAlias = Callable[..., object]  # from a list of samples to a batch


class DataPosition(Protocol):
    """Where a worker is in the data: at step ``offset + done`` of a shard.

    Attributes:
        sequence: changes with the shard.
        shard: its number; None where the server chooses none.
        offset: steps of the shard that were drawn before this assignment.
        done: steps since then.
        finished: the run is over.
    """

    @property
    def sequence(self) -> int: ...

    @property
    def shard(self) -> int | None: ...

    @property
    def offset(self) -> int: ...

    @property
    def done(self) -> int: ...

    @property
    def finished(self) -> bool: ...


class ShardedLoader:
    """An iterable of batches that is endless until the run is over.

    A shard is a contiguous part of the data set, shuffled anew in each pass over it. The server knows how far each
    shard has been drawn, so that workers that take turns on one draw what others have not.

    Args:
        dataset: of a known length.
        sizes: samples in each shard.
        batch_size: samples of one micro-batch of one rank.
        micro_batches: of a local step.
        rank: of this process, among the ``ranks`` that share the worker's batches.
        ranks: how many they are.
        seed: of the orders.
        collate: makes a batch of a list of samples; torch's default if None.
        join: joins the run if that has not happened yet, since only then there is a shard to draw from, and returns
            the position, which moves on as the worker steps.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        sizes: list[int],
        batch_size: int,
        micro_batches: int,
        rank: int,
        ranks: int,
        seed: int,
        collate: Collate | None,
        join: Callable[[], DataPosition],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._order = ShardOrder(sizes, seed)
        self.micro_batches, self.rank, self.ranks = micro_batches, rank, ranks
        self.collate = collate or default_collate
        self.join = join

    def __len__(self) -> int:
        """Batches of one pass over the data set."""
        assert isinstance(self.dataset, Sized)
        return len(self.dataset) // (self.batch_size * self.ranks)

    def __iter__(self) -> Iterator[object]:
        """Follows the worker: a step's batches are those of its shard, whatever was drawn ahead."""
        position, step, micro_batch = self.join(), (-1, -1), 0
        while not position.finished:
            current = (position.sequence, position.done)
            step, micro_batch = current, micro_batch + 1 if current == step else 0
            number = (position.offset + position.done) * self.micro_batches + micro_batch
            yield self.collate([self.dataset[index] for index in self._indices(position.shard or 0, number)])

    def _indices(self, shard: int, number: int) -> list[int]:
        first = (number * self.ranks + self.rank) * self.batch_size
        return self._order.indices(shard, first, self.batch_size)


def length_of(dataset: object) -> int:
    """The number of samples in a data set, which must be known to divide it into shards.

    Raises:
        ConfigurationError: it has no length, or none above 0.
    """
    if not isinstance(dataset, Sized) or len(dataset) == 0:
        raise ConfigurationError("training_data must be a data set with a length above 0, to be divided into shards")
    return len(dataset)


def sizes_of_shards(dataset: object, shards: int, workers: int, name: str) -> list[int]:
    """Samples in each shard of a data set; no shards where the script gave no data set.

    Args:
        shards: how many; 0 for as many as workers.
        name: of the configuration, for errors.

    Raises:
        ConfigurationError: the data has fewer samples than shards, or no known length, or there is none to divide.
    """
    if dataset is None:
        if shards:
            raise ConfigurationError(f'{name}: "shards" needs training_data=, of which the shards are parts')
        return []
    samples, count = length_of(dataset), shards or workers
    if samples < count:
        raise ConfigurationError(f"training_data has {samples} samples, too few for {count} shards")
    return shard_sizes(samples, count)
