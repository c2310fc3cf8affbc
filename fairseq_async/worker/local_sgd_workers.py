"""Which worker of local SGD a run's options ask for."""

from fairseq_async.config import AsyncLocalSGDOptions, LocalSGDOptions
from fairseq_async.worker.client import Client
from fairseq_async.worker.fragments import FragmentedLocalSGDWorker
from fairseq_async.worker.local_sgd import LocalSGDWorker
from fairseq_async.worker.overlap import OverlappedLocalSGDWorker
from fairseq_async.worker.replica import Replica


def local_sgd_worker(client: Client, replica: Replica, options: LocalSGDOptions) -> LocalSGDWorker:
    """A worker of local SGD, as the options say.

    Raises:
        ConfigurationError: the model does not have so many fragments.
    """
    if isinstance(options, AsyncLocalSGDOptions) and options.in_fragments:
        return FragmentedLocalSGDWorker(client, replica, options)
    overlaps = isinstance(options, AsyncLocalSGDOptions) and options.overlap
    return (OverlappedLocalSGDWorker if overlaps else LocalSGDWorker)(client, replica, options.max_refused)
