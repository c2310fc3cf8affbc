"""Small stand-ins for what a test cannot have."""

import errno
import io
import os
from dataclasses import dataclass, field

from torch.utils.data import Dataset


class NoRoom(io.StringIO):
    """Fails at each write as a file on a full disk does, or with another error."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise OSError(self.error, os.strerror(self.error))


@dataclass
class Position:
    """A worker at the beginning of shard 0; see :class:`~fairseq_async.worker.shards.DataPosition`."""

    sequence: int = 0
    shard: int | None = 0
    offset: int = 0
    done: int = 0
    first_micro_batch: int | None = None
    micro_batches: int = 0
    finished: bool = False


@dataclass
class Clock:
    """Stands still until a test moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Time:
    """Stands for the module ``time`` of a module under test: waiting takes no time, and only waiting moves the clock.

    Attributes:
        pauses: the seconds of each wait.
    """

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds < 1e6
        self.pauses.append(seconds)
        self.now += seconds


class Numbers(Dataset[int]):
    """A data set whose sample n is n."""

    supports_fetch_outside_dataloader = True  # as fairseq's data sets

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index
