"""Determines which samples and batches of a shard a worker draws, equally in a real run and in a simulated one."""

from typing import Protocol

import torch

SEEDS = 1 << 64  # that torch's generators have


class DataPosition(Protocol):
    """A worker's position in the data: step ``offset + done`` of a shard.

    Attributes:
        sequence: a number that changes whenever the shard does.
        shard: number of the shard; None where the server assigns none.
        offset: number of steps of the shard that were drawn before this assignment.
        done: number of steps since then.
        drawn: number of batches of the shard in the steps before, where steps differ in their number; else None.
        finished: whether the run is over.
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
    def drawn(self) -> int | None: ...

    @property
    def finished(self) -> bool: ...


class BatchCounter:
    """Numbers a shard's batches as a worker draws them. The first batch of a step depends on the step alone, not on
    the number of batches drawn before.

    Args:
        micro_batches: number of micro-batches in a local step.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._step, self._micro_batch = (-1, -1), 0  # of the last batch drawn

    def next(self, position: DataPosition) -> int:
        """Returns the number of the next batch in the shard; the count goes on over further passes."""
        current = (position.sequence, position.done)
        self._step, self._micro_batch = current, self._micro_batch + 1 if current == self._step else 0
        first = (position.offset + position.done) * self.micro_batches if position.drawn is None else position.drawn
        return first + self._micro_batch


def shard_sizes(samples: int, shards: int) -> list[int]:
    """Returns the number of samples in each shard; these differ by at most one."""
    return [samples // shards + (index < samples % shards) for index in range(shards)]


class ShardOrder:
    """The order of the samples in each shard, a contiguous part of the data set that is shuffled anew in each pass.

    Args:
        sizes: number of samples in each shard.
        seed: seed of the orders.
    """

    def __init__(self, sizes: list[int], seed: int) -> None:
        self.sizes, self.seed = sizes, seed
        self._orders: dict[tuple[int, int], torch.Tensor] = {}

    def indices(self, shard: int, first: int, count: int) -> list[int]:
        """Returns ``count`` samples of a shard from the ``first``-th on, by their indices in the whole data set; the
        count goes on over further passes."""
        return [self._index(shard, sample) for sample in range(first, first + count)]

    def _index(self, shard: int, sample: int) -> int:
        passes, position = divmod(sample, self.sizes[shard])
        return sum(self.sizes[:shard]) + int(self._order(shard, passes)[position])

    def _order(self, shard: int, passes: int) -> torch.Tensor:
        if (shard, passes) not in self._orders:
            # a batch may reach from one pass into the next, not farther; others may have drawn passes in between
            self._orders = {k: v for k, v in self._orders.items() if k[0] != shard or abs(k[1] - passes) <= 1}
            generator = torch.Generator().manual_seed(((self.seed * 1009 + shard) * 10007 + passes) % SEEDS)
            self._orders[shard, passes] = torch.randperm(self.sizes[shard], generator=generator, device="cpu")
        return self._orders[shard, passes]
