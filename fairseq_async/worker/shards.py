"""In which order the samples of a shard are drawn: the same in a real run and in a simulated one."""

import torch


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
