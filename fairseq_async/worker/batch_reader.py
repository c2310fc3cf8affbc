"""Reads batches by their keys; loader processes make the following ones ahead."""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fairseq_async.worker.shards import BatchKey


class BatchReader:
    """Reads batches by their keys; loader processes make the following batches meanwhile.

    When the server gives others, as of another shard, the batches that were made ahead are thrown away: as many as the
    processes hold, at most ``2 * num_workers``.

    Args:
        batches: a data set whose indices are keys, and whose samples are a key and its batch. Each process has a copy.
        num_workers: number of processes; 0 for none, then each batch is made when it is read.
        pin_memory: whether batches are in pinned memory, where there is a device to copy them to.
        following: returns the key that is expected after another.
        worker_init_fn: called in each process with its number, as of a ``DataLoader``.
    """

    def __init__(
        self,
        batches: Dataset[tuple[BatchKey, object]],
        num_workers: int,
        pin_memory: bool,
        following: Callable[[BatchKey], BatchKey],
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._keys = _KeysAhead(following)
        self._loader = DataLoader(
            batches,
            batch_size=None,  # a sample is a whole batch
            sampler=self._keys,
            num_workers=num_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            collate_fn=_unchanged,
            worker_init_fn=worker_init_fn,
            generator=torch.Generator(),  # it seeds the processes; torch's own would move the model's dropout on
        )
        self._batches: Iterator[tuple[BatchKey, object]] | None = None

    def read(self, key: BatchKey) -> object:
        """Returns the batch of this key."""
        if key not in self._keys.ahead:
            self._keys.following = key
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(batch for _, batch in self._batches if self._keys.ahead.popleft() == key)


class _KeysAhead(Sampler[BatchKey]):
    """Yields the keys that are expected next, without end.

    Attributes:
        ahead: the keys whose batches are still to be read. What is expected may have changed since they were yielded.
    """

    def __init__(self, after: Callable[[BatchKey], BatchKey]) -> None:
        self.following, self._after = (0, 0), after
        self.ahead: deque[BatchKey] = deque()

    def __iter__(self) -> Iterator[BatchKey]:
        while True:
            key = self.following
            self.following = self._after(key)
            self.ahead.append(key)
            yield key


def _unchanged(sample: object) -> object:
    """Returns the sample as it is, in place of torch's default ``collate_fn``, which would make tensors of arrays."""
    return sample
