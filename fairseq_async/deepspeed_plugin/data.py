"""The loader that draws a worker's batches from the shards that the server chooses."""

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil, floor
from typing import NoReturn, TypeAlias

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Dataset, default_collate

from fairseq_async.deepspeed_plugin.loading import Loading
from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.worker.batch_reader import BatchReader
from fairseq_async.worker.shards import BatchCounter, BatchKey, DataPosition, ShardOrder, shard_sizes

_AHEAD = 16  # batches that a loop may draw before it uses them
Collate: TypeAlias = Callable[..., object]  # from a list of samples to a batch


@dataclass(frozen=True)
class DataShare:
    """Which part of the data a rank draws, and in what pieces.

    Attributes:
        sizes: samples in each shard.
        workers: number of workers that share the data set.
        batch_size: samples of one micro-batch of one rank.
        micro_batches: number of micro-batches in a local step.
        rank: this process's rank among the ``ranks`` that share the worker's batches.
        ranks: number of ranks that share the worker's batches.
    """

    sizes: list[int]
    workers: int
    batch_size: int
    micro_batches: int
    rank: int
    ranks: int


class ShardedLoader:
    """An iterable of batches from the shards that the server chooses, to the end of the run or for one pass.

    A shard is a contiguous part of the data set, shuffled anew in each pass over it. The server knows how far each
    shard has been drawn, so that workers that take turns on one draw what others have not. A second loop over the
    loader goes on where the first one ended.

    Args:
        dataset: a data set of known length.
        share: this rank's share of the data.
        seed: seed of the orders in which shards are shuffled.
        collate: makes a batch of a list of samples; torch's default if None.
        join: joins the run if that has not happened yet, since only then there is a shard to draw from, and returns
            the position, which moves on as the worker steps.
        endless: whether a loop goes on until the run is over; else it has ``len(loader)`` batches, if the run is not
            over before.
        loading: by how many processes batches are made, and what happens to the last batch of a pass.
        trained: returns the number of micro-batches in the engine's steps so far, skipped ones included.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        share: DataShare,
        seed: int,
        collate: Collate | None,
        join: Callable[[], DataPosition],
        endless: bool,
        loading: Loading,
        trained: Callable[[], int],
    ) -> None:
        self.dataset, self.share, self._trained = dataset, share, trained
        batches = _ShardBatches(dataset, share, ShardOrder(share.sizes, seed), collate or default_collate)
        self.join, self.endless = join, endless
        self._pass: int | None = None  # of the present loop, where the server deals batches
        self._counter = BatchCounter(share.micro_batches, share.workers)
        self._reader = BatchReader(batches, loading.num_workers, loading.pin_memory, self._counter.following)
        self._drop_last = loading.drop_last

    def __len__(self) -> int:
        """Number of batches in this worker's part of one pass over the data set, as in DeepSpeed's own loader."""
        batches = length_of(self.dataset) / (self.share.batch_size * self.share.ranks * self.share.workers)
        return floor(batches) if self._drop_last else ceil(batches)

    def __iter__(self) -> Iterator[object]:
        """Yields batches at the worker's position: a step's are those of its shard, whatever was drawn ahead."""
        position, before = self.join(), self._trained()
        dealt = position.first_micro_batch is not None
        shared = self.share.workers if dealt else 1  # one may have nearly all of a step
        for drawn in count():
            if position.finished or not (self.endless or self._is_in_pass(position, drawn)):
                return
            self._check_number(drawn, self._trained() - before, shared)
            yield self._reader.read(self._counter.next(position))

    def _is_in_pass(self, position: DataPosition, drawn: int) -> bool:
        """Whether the next batch is one of the loop's pass: the next ``len(self)`` batches of this worker's part, or,
        where the server deals batches, the rest of a pass over all parts, of which a fast worker has more."""
        if position.first_micro_batch is None:
            return drawn < len(self)
        _, number = self._counter.peek(position)
        if self._pass is None:
            self._pass = number // len(self)
        if number < (self._pass + 1) * len(self):
            return True
        self._pass += 1
        return False

    def _check_number(self, drawn: int, trained: int, shared: int) -> None:
        """Ends the process with one line where steps have more batches than the configuration says: the next step would
        begin with batches that this one has had already."""
        average = self.share.micro_batches
        if trained and drawn > trained + shared * average + _AHEAD:  # a loop without a step may evaluate
            fail(
                f"{drawn} batches were drawn for steps that have had {trained}, and "
                f'"gradient_accumulation_steps" is {average}: with training_data= give the number of batches of a step '
                "there, or use a data loader of your own"
            )


class _ShardBatches(Dataset[tuple[BatchKey, object]]):
    """A data set of a rank's part of each batch of the shards, by the batch's key."""

    def __init__(self, dataset: Dataset[object], share: DataShare, order: ShardOrder, collate: Collate) -> None:
        self.dataset, self.share, self.order, self.collate = dataset, share, order, collate

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, object]:
        shard, number = key
        first = (number * self.share.ranks + self.share.rank) * self.share.batch_size
        indices = self.order.indices(shard, first, self.share.batch_size)
        return key, self.collate([self.dataset[index] for index in indices])


def fix_batch_size(engine: DeepSpeedEngine) -> None:
    """Makes an engine refuse another batch size: its loader numbers the batches of its shards by the present one, and
    would draw samples twice. Where the server divides a step, its size is the server's."""
    for name in ("set_train_batch_size", "set_train_micro_batch_size"):
        setattr(engine, name, partial(_refuse_batch_size, name))


def _refuse_batch_size(name: str, size: int) -> NoReturn:
    fail(
        f"{name}({size}): with training_data= the batch size stays that of the configuration; set it there, or give a "
        'data loader of your own, and "shares": "equal"'
    )


def length_of(dataset: object) -> int:
    """Returns the number of samples in a data set, which must be known to divide it into shards.

    Raises:
        ConfigurationError: the data set has no length, or none above 0, or no samples by number.
    """
    if isinstance(dataset, Sized) and not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"training_data is a {type(dataset).__name__}, without samples by number: give a data set"
        )
    if not isinstance(dataset, Sized) or len(dataset) == 0:
        raise ConfigurationError("training_data must be a data set with a length above 0, to be divided into shards")
    return len(dataset)


def sizes_of_shards(dataset: object, shards: int, workers: int, name: str) -> list[int]:
    """Returns the number of samples in each shard of a data set; an empty list if the script gave no data set.

    Args:
        shards: number of shards; 0 for as many as workers.
        name: name of the configuration, for errors.

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
