"""fairseq's batches: dummies at the end of an epoch, and iterators that are made once and cached."""

from collections.abc import Callable, Sequence

from fairseq.data.iterators import GroupedEpochBatchIterator

from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject


def real_batches(samples: Sequence[FairseqObject]) -> list[FairseqObject]:
    """Returns the batches that are not empty: fairseq fills up an epoch with empty ones if its batches do not divide.

    fairseq sets the step's sample size to 0 when the last of several accumulated batches is empty: the tokens of the
    others would not be counted. For a step of empty batches alone, callers keep one of them, ``samples[:1]``.
    """
    return [sample for sample in samples if sample is not None and len(sample)]


def batches_of_pass(iterator: FairseqObject) -> int | None:
    """Returns the number of batches in a pass of all workers over the training set; None if it is not known."""
    if isinstance(iterator, GroupedEpochBatchIterator):  # its frozen batches are a list for each of its data sets
        return len(iterator)
    batches = getattr(iterator, "frozen_batches", None)
    return None if batches is None else len(batches)


def batches_of_first_epoch(
    task: FairseqObject, cfg: FairseqConfig, remake: Callable[[], FairseqObject]
) -> FairseqObject | None:
    """Returns a resumed run's training iterator, made as the run's first epoch made it; None if none is cached.

    fairseq makes a cached iterator's batches once, shuffled by the number of the epoch in which it makes them. A run
    that is resumed in a later epoch would have other batches than the run before. The exception is an iterator that
    makes its batches anew in each epoch (``--rebuild-batches`` of audio tasks): that one is right as it is, thus None.

    Args:
        remake: makes the iterator of epoch 1 again.
    """
    cached, dataset = task.dataset_to_epoch_iter, task.dataset(cfg.dataset.train_subset)
    if dataset not in cached or callable(getattr(cached[dataset], "batch_sampler", None)):
        return None
    del cached[dataset]
    return remake()
