"""Reads batches, which loader processes make ahead if the configuration asks for them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fairseq_async.errors import ConfigurationError
from fairseq_async.worker.shards import BatchKey

_KEYS = '"data_efficiency": "data_sampling"'


@dataclass(frozen=True)
class Loading:
    """How ``training_data`` is read: DeepSpeed's keys ``data_efficiency.data_sampling`` and ``dataloader_drop_last``.

    Attributes:
        num_workers: loader processes of this rank; 0 for none, then each batch is made when it is drawn.
        pin_memory: whether batches are in pinned memory, where there is a device to copy them to.
        drop_last: whether one pass leaves out the last batch where the data is too short for it.
    """

    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False


def loading_of(config: dict[str, Any], name: str) -> Loading:
    """Returns how a DeepSpeed configuration has ``training_data`` read.

    Args:
        config: DeepSpeed's configuration.
        name: name of the configuration, for errors.

    Raises:
        ConfigurationError: a value is wrong, or DeepSpeed would choose the order of the data, which the server chooses.
    """
    sampling = config.get("data_efficiency", {}).get("data_sampling", {})
    if sampling.get("curriculum_learning", {}).get("enabled"):
        raise ConfigurationError(
            f'{name}: {_KEYS}: "curriculum_learning" is not supported with training_data=, whose order follows the '
            "shards that the server chooses: give your own DataLoader, or leave it out"
        )
    workers, pin = sampling.get("num_workers", 0), sampling.get("pin_memory", False)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigurationError(f'{name}: {_KEYS}: "num_workers" is {workers!r}: give a whole number, 0 for none')
    if not isinstance(pin, bool):
        raise ConfigurationError(f'{name}: {_KEYS}: "pin_memory" is {pin!r}: give true or false')
    return Loading(workers, pin, config.get("dataloader_drop_last") is True)


class BatchReader:
    """Reads batches by their keys; loader processes make the following batches meanwhile.

    When the server gives others, as of another shard, the batches that were made ahead are thrown away: as many as the
    processes hold, at most ``2 * num_workers``.

    Args:
        batches: a data set whose indices are keys, and whose samples are a key and its batch. Each process has a copy.
        loading: the number of processes, and whether batches are in pinned memory.
        following: returns the key that is expected after another.
    """

    def __init__(
        self,
        batches: Dataset[tuple[BatchKey, object]],
        loading: Loading,
        following: Callable[[BatchKey], BatchKey],
    ) -> None:
        self._keys, self._following = _KeysAhead(following), following
        self._loader = DataLoader(
            batches,
            batch_size=None,  # a sample is a whole batch
            sampler=self._keys,
            num_workers=loading.num_workers,
            pin_memory=loading.pin_memory and torch.cuda.is_available(),
            collate_fn=_unchanged,
            generator=torch.Generator(),  # it seeds the processes; torch's own would move the model's dropout on
        )
        self._batches: Iterator[tuple[BatchKey, object]] | None = None
        self._expected: BatchKey | None = None

    def read(self, key: BatchKey) -> object:
        """Returns the batch of this key."""
        if key != self._expected:
            self._keys.following = key
        if self._batches is None:
            self._batches = iter(self._loader)
        self._expected = self._following(key)
        return next(batch for made, batch in self._batches if tuple(made) == key)  # pinning makes a list of a tuple


class _KeysAhead(Sampler[BatchKey]):
    """Yields the keys that are expected next, without end."""

    def __init__(self, after: Callable[[BatchKey], BatchKey]) -> None:
        self.following, self._after = (0, 0), after

    def __iter__(self) -> Iterator[BatchKey]:
        while True:
            key = self.following
            self.following = self._after(key)
            yield key


def _unchanged(sample: object) -> object:
    """Returns the sample as it is, in place of torch's default ``collate_fn``, which would make tensors of arrays."""
    return sample
