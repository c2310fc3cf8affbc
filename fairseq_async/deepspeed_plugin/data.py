"""Batches from the shards that the server chooses."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import Dataset, default_collate

from fairseq_async.worker.shards import ShardOrder


class Drawing(Protocol):
    """Where a worker is in the data: step ``offset + done`` of a shard.

    Attributes:
        sequence: changes with the shard.
    """

    sequence: int
    shard: int | None
    offset: int

    @property
    def done(self) -> int: ...

    @property
    def finished(self) -> bool: ...


class ShardedLoader:
    """Endless until the run is over. A shard is a contiguous part of the data set, shuffled anew in each pass over it;
    the server knows how far it has been drawn, so that workers that take turns on it draw what others have not.

    Args:
        dataset: of a known length.
        sizes: of the shards.
        batch_size: samples of one micro-batch of one rank.
        micro_batches: of a local step.
        rank: which of the ``ranks`` of an island draws.
        seed: of the orders.
        enter: joins the run, if that has not happened yet: only then there is a shard to draw from.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sizes: list[int],
        batch_size: int,
        micro_batches: int,
        rank: int,
        ranks: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        enter: Callable[[], Drawing],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._order = ShardOrder(sizes, seed)
        self.micro_batches, self.rank, self.ranks = micro_batches, rank, ranks
        self.collate = collate or default_collate
        self.enter = enter

    def __len__(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset) // (self.batch_size * self.ranks)

    def __iter__(self) -> Iterator[Any]:
        """Follows the worker: a step's batches are those of its shard, whatever was drawn ahead."""
        local, at, micro = self.enter(), (-1, -1), 0
        while not local.finished:
            step = (local.sequence, local.done)
            at, micro = step, micro + 1 if step == at else 0
            number = (local.offset + local.done) * self.micro_batches + micro
            yield self.collate([self.dataset[index] for index in self._indices(local.shard or 0, number)])

    def _indices(self, shard: int, number: int) -> list[int]:
        first = (number * self.ranks + self.rank) * self.batch_size
        return self._order.indices(shard, first, self.batch_size)
