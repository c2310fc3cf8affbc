"""A ``Trainer``'s batches in the order in which the server deals them, where those of a step are divided by speed."""

from collections.abc import Iterator
from copy import copy
from math import ceil
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, Dataset, SequentialSampler

from fairseq_async.worker.batch_reader import BatchReader
from fairseq_async.worker.hybrid import HybridWorker
from fairseq_async.worker.shards import BatchCounter, BatchKey


class DealtBatches:
    """Reads the batches that the server deals to a worker, for a loader of one part.

    The order is that of a synchronous run: step after step, and in each step the batches of every worker's part of the
    pass (:func:`~fairseq_async.worker.shards.place`). The parts are accelerate's. Empty batches, which are left out,
    fill up the last step of a pass. Workers of equal speed so have the batches of their own parts, step by step.

    Args:
        loader: the loader of this rank's part, for which :func:`can_be_dealt` is true.
        worker: the worker side of the method.
        micro_batches: number of batches of each part in a step.
    """

    def __init__(self, loader: DataLoaderShard, worker: HybridWorker, micro_batches: int) -> None:
        workers = worker.client.workers
        self._loader, self._worker = loader, worker
        batches = _Batches(loader, workers, micro_batches)
        self._length, self._in_pass = batches.length, batches.length * workers
        self._counter = BatchCounter(micro_batches, workers)
        self._reader = BatchReader(
            batches, loader.num_workers, loader.pin_memory, self._counter.following, loader.worker_init_fn
        )
        self._present = self.next_pass

    @property
    def next_pass(self) -> int:
        """The number of the pass of this worker's next gradient, from 0 on."""
        return (self._worker.first_micro_batch or 0) // self._in_pass

    @property
    def pass_is_over(self) -> bool:
        """Whether this worker's next gradient begins in another pass than the present one."""
        return self.next_pass != self._present

    def begin_pass(self) -> int:
        """Begins the pass of this worker's next gradient and returns its number."""
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)  # as a DataLoader seeds a pass
        self._present = self.next_pass
        return self._present

    def draw(self) -> tuple[list[Any], bool]:
        """Draws the batches of the worker's next gradient, and tells the worker how many there are, and how many empty.

        Returns:
            Those that are not empty, and False; where all are empty, a batch that stands in for them, and True: its
            gradient is to have the weight 0.
        """
        worker = self._worker
        worker.micro_batches, worker.empty = worker.micro_batches + worker.empty, 0  # those of a step that was skipped
        dealt, first = worker.micro_batches, self.next_pass * self._length
        read = [self._reader.read(self._counter.next(worker)) for _ in range(dealt)]
        batches = [batch for batch in read if batch is not None]
        if stands_in := not batches:
            batches = [self._reader.read((0, first))]
        worker.micro_batches, worker.empty = len(batches), dealt - len(batches)
        loader = self._loader
        return [send_to_device(each, loader.device, non_blocking=loader._non_blocking) for each in batches], stands_in


class _Batches(Dataset[tuple[BatchKey, Any]]):
    """The batches of all parts by their keys; None for the empty ones that fill up the last step of a pass.

    Attributes:
        length: number of batches of a part in a pass, with empty ones.
    """

    def __init__(self, loader: DataLoaderShard, workers: int, micro_batches: int) -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        shard: BatchSamplerShard = loader.batch_sampler
        self._batches, self._ranks = shard.batch_sampler, shard.num_processes // workers
        own = range(shard.process_index % self._ranks, shard.num_processes, self._ranks)
        self._parts = [copy(shard) for _ in own]  # this rank's of each worker's part
        for part, index in zip(self._parts, own, strict=True):
            part.process_index = index
        self.length = ceil(len(shard) / micro_batches) * micro_batches
        self._pass = -1
        self._order: list[list[list[int]]] = []

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, Any]:
        part, number = key
        passes, position = divmod(number, self.length)
        batches = self._of_pass(passes)[part]
        return key, self._collate(self._samples(batches[position])) if position < len(batches) else None

    def _samples(self, indices: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)  # of data sets that read many at once
        samples: list[Any] = [self._dataset[index] for index in indices] if together is None else together(indices)
        return samples

    def _of_pass(self, number: int) -> list[list[list[int]]]:
        if number != self._pass:
            self._pass = number
            for each in (self._dataset, self._batches.sampler):
                if hasattr(each, "set_epoch"):
                    each.set_epoch(number)
            batches = _Pass(self._batches)
            for part in self._parts:
                part.batch_sampler = batches
            self._order = list(map(list, self._parts))
        return self._order


class _Pass:
    """The batches of one pass, as a batch sampler for accelerate's parts."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.batch_size, self.drop_last, self._batches = sampler.batch_size, sampler.drop_last, list(sampler)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._batches)  # copies: accelerate fills up the last one


def can_be_dealt(loader: object, workers: int) -> bool:
    """Whether any worker can draw any batch of a loader: its parts are accelerate's and of equal length, and the
    order of a pass depends on nothing but its number."""
    shard: Any = loader.batch_sampler if isinstance(loader, DataLoaderShard) else None
    if type(shard) is not BatchSamplerShard or shard.num_processes % workers or not shard.even_batches:
        return False
    batches = shard.batch_sampler
    return type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, SeedableRandomSampler)
