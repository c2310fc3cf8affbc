"""Which samples and batches of a shard a worker draws: the same in a real run and in a simulated one."""

from typing import Protocol

import torch


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


class BatchCounter:
    """Numbers a shard's batches as a worker draws them: each step begins with its own, whatever was drawn before.

    Args:
        micro_batches: of a local step.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._step, self._micro_batch = (-1, -1), 0  # drawn last

    def next(self, position: DataPosition) -> int:
        """The number of the next batch in the shard, passes on end."""
        current = (position.sequence, position.done)
        self._step, self._micro_batch = current, self._micro_batch + 1 if current == self._step else 0
        return (position.offset + position.done) * self.micro_batches + self._micro_batch


def shard_sizes(samples: int, shards: int) -> list[int]:
    """Samples in each shard: equal but for one."""
    return [samples // shards + (index < samples % shards) for index in range(shards)]


class ShardOrder:
    """A shard is a contiguous part of the data set, shuffled anew in each pass over it.

    Args:
        sizes: samples in each shard.
        seed: of the orders.
    """

    def __init__(self, sizes: list[int], seed: int) -> None:
        self.sizes, self.seed = sizes, seed
        self._orders: dict[tuple[int, int], torch.Tensor] = {}

    def indices(self, shard: int, first: int, count: int) -> list[int]:
        """The ``first``-th and following samples of a shard, passes on end, by their numbers in the whole set."""
        return [self._index(shard, sample) for sample in range(first, first + count)]

    def _index(self, shard: int, sample: int) -> int:
        passes, position = divmod(sample, self.sizes[shard])
        return sum(self.sizes[:shard]) + int(self._order(shard, passes)[position])

    def _order(self, shard: int, passes: int) -> torch.Tensor:
        if (shard, passes) not in self._orders:
            self._orders.pop((shard, passes - 2), None)  # a batch may reach from one pass into the next, not farther
            generator = torch.Generator().manual_seed((self.seed * 1009 + shard) * 10007 + passes)
            self._orders[shard, passes] = torch.randperm(self.sizes[shard], generator=generator)
        return self._orders[shard, passes]
