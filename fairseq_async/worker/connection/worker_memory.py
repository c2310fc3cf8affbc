"""A worker's vector of updates and parameters, wherever the server reads it."""

import torch
from torch import Tensor

from fairseq_async.errors import ExchangeError
from fairseq_async.exchange import GpuMemory, SharedMemory
from fairseq_async.protocol import Welcome


class WorkerMemory:
    """A worker's flat vector: in the shared memory of a server on this machine, else in memory of this process.

    With a server on a GPU it is this process's own vector there, from which updates are copied to the slot, since the
    slot is lost with a server that dies, and the update is to be sent again.

    Attributes:
        remote: whether the slot goes behind the messages: the server is on another machine, or on a GPU on which this
            worker cannot share memory.
        shared: the memory that is shared with the server; None where there is none, and before the run is joined.
    """

    def __init__(self, remote: bool) -> None:
        self.remote = remote
        self.shared: SharedMemory | GpuMemory | None = None
        self._flat: Tensor | None = None
        self._there: Tensor | None = None  # the slot of a server on a GPU

    @property
    def slot(self) -> Tensor:
        """The worker's vector; raises an ExchangeError before the run is joined."""
        if self._flat is None:
            raise ExchangeError("this worker has not joined the run")
        return self._flat

    def send(self, part: Tensor) -> Tensor | None:
        """Brings a part of the vector to where the server reads it; returns the part if it is to go behind the message,
        else None."""
        if self._there is not None and self.shared is not None:
            self._same(part).copy_(part)
            self.shared.settle()
        return part if self.remote else None

    def receive(self, part: Tensor) -> None:
        """Takes a part of the vector that the server has written."""
        if self._there is not None:
            part.copy_(self._same(part))

    def _same(self, part: Tensor) -> Tensor:
        """Returns the part of the server's slot that a part of the vector is of."""
        assert self._there is not None
        start = part.storage_offset() - self.slot.storage_offset()
        return self._there[start : start + part.numel()]

    @property
    def published(self) -> SharedMemory | GpuMemory | None:
        """The shared memory, if it has published parameters."""
        return self.shared if self.shared is not None and self.shared.publishes else None

    def share(self, memory: SharedMemory) -> None:
        """Places the vector, where the server is remote, in memory that other processes of this machine can open."""
        self.shared, self._flat = memory, memory.slot(0)

    def place(self, welcome: Welcome, worker: int, size: int) -> None:
        """Places the vector where the server's welcome says; what an earlier server's slot had, the new one has too."""
        before, self.remote = self._flat, self.remote or not welcome.memory
        if self.remote:
            if before is None:
                self._flat = torch.zeros(size, dtype=torch.float32, device="cpu")
            return
        old = self.shared
        if welcome.on_gpu:
            self.shared = GpuMemory.attach(welcome.memory, welcome.on_gpu, size, welcome.slots, worker)
            self._there = self.shared.slot(worker)
            flat = torch.zeros_like(self._there) if before is None else before
        else:
            self.shared = SharedMemory.attach(welcome.memory, size, welcome.slots, welcome.publishes)
            flat = self.shared.slot(worker)
        if old is not None:
            old.close()
        if before is not None and before.data_ptr() != flat.data_ptr():
            flat.copy_(before)  # the dead server's slot: an update, or the start of the local steps
        self._flat = flat  # only now: another thread may look at it without the lock

    def close(self) -> None:
        """Closes the memory: a process that lives on would keep that of a server that has ended."""
        if self.shared is not None:
            self.shared.close()
