"""Determines which samples and batches of a shard a worker draws, equally in a real run and in a simulated one."""

from typing import Protocol, TypeAlias

import torch

BatchKey: TypeAlias = tuple[int, int]  # a shard, and the number of a batch in it; the number goes on over passes

SEEDS = 1 << 64  # that torch's generators have


class DataPosition(Protocol):
    """A worker's position in the data: step ``offset + done`` of a shard.

    Attributes:
        sequence: a number that changes whenever the shard does.
        shard: number of the shard; None where the server assigns none.
        offset: number of steps of the shard that were drawn before this assignment.
        done: number of steps since then.
        first_micro_batch: number of the step's first batch in the run's order, where the server deals the batches.
        micro_batches: number of the step's batches, where the server deals them.
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
    def first_micro_batch(self) -> int | None: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def finished(self) -> bool: ...


def place(number: int, workers: int, micro_batches: int) -> BatchKey:
    """Returns the batch with this number in the order of a synchronous run, whose steps have ``micro_batches`` batches
    of each worker's part: those of part 0, then those of part 1, and so on."""
    step, number = divmod(number, workers * micro_batches)
    part, number = divmod(number, micro_batches)
    return part, step * micro_batches + number


class BatchCounter:
    """Numbers batches as a worker draws them. The first batch of a step depends on the step alone, not on the number of
    batches drawn before.

    Args:
        micro_batches: number of micro-batches in a local step, or of each worker in a step, on average.
        workers: number of workers that share the data set.
    """

    def __init__(self, micro_batches: int, workers: int) -> None:
        self.micro_batches, self.workers = micro_batches, workers
        self._step, self._micro_batch = (-1, -1), 0  # of the last batch drawn
        self._dealt: tuple[int, int] | None = None  # the step's first batch in the run's order, and their number

    def next(self, position: DataPosition) -> BatchKey:
        """Returns the next batch at a position."""
        key = self.peek(position)
        current = (position.sequence, position.done)
        self._step, self._micro_batch = current, self._micro_batch + 1 if current == self._step else 0
        if position.first_micro_batch is not None:
            self._dealt = position.first_micro_batch, position.micro_batches
        return key

    def peek(self, position: DataPosition) -> BatchKey:
        """Returns what :meth:`next` would return."""
        micro_batch = self._micro_batch + 1 if (position.sequence, position.done) == self._step else 0
        if position.first_micro_batch is None:
            return position.shard or 0, (position.offset + position.done) * self.micro_batches + micro_batch
        steps, micro_batch = divmod(micro_batch, position.micro_batches)  # a loop may draw ahead of its step
        number = position.first_micro_batch + steps * self.workers * self.micro_batches + micro_batch
        return place(number, self.workers, self.micro_batches)

    def following(self, key: BatchKey) -> BatchKey:
        """Returns the batch that this worker draws after another one, if the next steps are divided as the last one."""
        part, number = key
        if self._dealt is None:
            return part, number + 1
        first, count = self._dealt
        all_parts = self.workers * self.micro_batches
        step, number = divmod(number, self.micro_batches)
        number += step * all_parts + part * self.micro_batches + 1
        if (number - first) % all_parts == count % all_parts:
            number += all_parts - count
        return place(number, self.workers, self.micro_batches)


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
