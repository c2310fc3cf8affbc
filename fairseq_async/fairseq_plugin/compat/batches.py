"""fairseq's batches: dummies at the end of an epoch, and iterators that are made once and cached."""

from collections.abc import Callable, Sequence

from fairseq_async.fairseq_plugin.compat.types import FairseqConfig, FairseqObject


def real_batches(samples: Sequence[FairseqObject]) -> list[FairseqObject]:
    """The batches without the empty ones, with which fairseq fills up an epoch whose batches do not divide evenly.

    fairseq sets the step's sample size to 0 when the last of several accumulated batches is empty: the tokens of the
    others would not be counted. A step of empty batches alone keeps one of them, ``samples[:1]``.
    """
    return [sample for sample in samples if sample is not None and len(sample)]


def batches_of_first_epoch(
    task: FairseqObject, cfg: FairseqConfig, remake: Callable[[], FairseqObject]
) -> FairseqObject | None:
    """The training iterator of a resumed run, made as the run's first epoch made it; None where none is cached.

    fairseq makes a cached iterator's batches once, shuffled by the number of the epoch in which it makes them. A run
    that is resumed in a later epoch would have other batches than the run before.

    Args:
        remake: makes the iterator of epoch 1 once more.
    """
    cached = task.dataset_to_epoch_iter
    if cached.pop(task.dataset(cfg.dataset.train_subset), None) is None:
        return None
    return remake()
