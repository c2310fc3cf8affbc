"""Where a worker is in its data, for tests that move it by hand."""

from dataclasses import dataclass


@dataclass
class Position:
    """A worker at the beginning of shard 0; see :class:`~fairseq_async.worker.shards.DataPosition`."""

    sequence: int = 0
    shard: int | None = 0
    offset: int = 0
    done: int = 0
    finished: bool = False
