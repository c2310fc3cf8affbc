"""Detects two workers that train on the same data, which no error shows: the loss looks as it should."""

from collections import deque

from fairseq_async.errors import RefusedError
from fairseq_async.protocol.notices import Tell

_KEPT = 4  # digests of each worker: it may be started again, and its reports must not fill the memory


class FirstBatches:
    """Compares the digests of the workers' first batches, and says once that two are equal.

    Args:
        tell: passes the line to the user.
        workers: number of workers that were announced; one that has joined later shares a part of the data.

    Attributes:
        must_differ: whether equal ones are an error, since the script has taken it on itself to divide the data.
    """

    def __init__(self, tell: Tell, workers: int) -> None:
        self._tell, self._workers = tell, workers
        self._digests: dict[int, deque[str]] = {}  # the last ones of each worker
        self._said = self.must_differ = False

    def note(self, worker: int, digest: str) -> None:
        """Compares the digest of a worker's first batches with the others'; a restarted worker may repeat its own.

        Raises:
            RefusedError: it is another worker's, and they must differ.
        """
        if self._said or worker >= self._workers:
            return
        own = self._digests.setdefault(worker, deque(maxlen=_KEPT))
        if digest not in own:
            own.append(digest)
        other = next((known for known, digests in self._digests.items() if digest in digests), worker)
        if other != worker:
            pair = "workers {} and {}".format(*sorted((other, worker)))
            if self.must_differ:
                raise RefusedError(
                    f"{pair} began with the same batches: the script reads callback.workers or args.world_size "
                    "before training, so the Trainer does not divide the data: divide it by that, or do not read it"
                )
            self._said = True
            self._tell(
                f"warning: {pair} began with the same batches: give each its own part of the data, "
                "as with DistributedSampler(data, num_replicas=N, rank=worker) for N workers"
            )
