"""Chooses the worker class of local SGD by a run's options."""

from fairseq_async.options.config import AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.fragments import FragmentedLocalSGDWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import OverlappedLocalSGDWorker
from fairseq_async.worker.replica import Replica


def local_sgd_worker(client: Client, replica: Replica, options: LocalSGDOptions) -> LocalSGDWorker:
    """Returns the worker of local SGD that the options ask for: plain, overlapped, or in fragments.

    Raises:
        ConfigurationError: the model has fewer tensors than the options have fragments.
    """
    if isinstance(options, AsyncLocalSGDOptions) and options.in_fragments:
        return FragmentedLocalSGDWorker(client, replica, options)
    overlaps = isinstance(options, AsyncLocalSGDOptions) and options.overlap
    return (OverlappedLocalSGDWorker if overlaps else LocalSGDWorker)(client, replica)
