"""Parameters and updates in the memory of a GPU, which the server shares with workers of its machine by CUDA IPC."""

import base64
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_async.errors import AsyncError, ExchangeError
from fairseq_async.exchange.shared_memory import SharedMemory, never

_VECTORS = 6  # of the model's size that a server has besides slots: published, own, accumulator, two moments, last step


class UnmappedError(AsyncError):
    """This process cannot map the server's memory, which is on a GPU that it does not see, or in another container."""


class CudaIpc:
    """What :class:`GpuMemory` asks of CUDA.

    Hazard: a process cannot map what it has allocated itself, and what it maps must not be used when the process that
    has allocated it is gone. So the server alone allocates, and a worker's death frees nothing.
    """

    def name(self, device: torch.device) -> str:
        """Returns a GPU's name, the same in every process; its index depends on ``CUDA_VISIBLE_DEVICES``."""
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def find(self, name: str) -> torch.device | None:
        """Returns the GPU of this name; None if this process does not see it."""
        devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        try:
            return next((device for device in devices if self.name(device) == name), None)
        except RuntimeError:  # CUDA has been asked before, when this process was to see none
            return None

    def free_bytes(self, device: torch.device) -> int:
        """Returns how many bytes of the GPU's memory are free."""
        return torch.cuda.mem_get_info(device)[0]

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Returns a new flat fp32 vector of zeros. Hazard: expandable segments cannot be shared, and are switched off
        in this process, the server's."""
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        return torch.zeros(size, dtype=torch.float32, device=device)

    def share(self, vector: Tensor) -> str:
        """Returns as text, for a message, what another process needs to :meth:`open` the vector."""
        fields = vector.untyped_storage()._share_cuda_()[1:]
        plain = [base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in fields]
        return json.dumps([torch.__version__, self.name(vector.device), plain])

    def open(self, shared: str, size: int) -> Tensor:
        """Maps a vector that another process has shared.

        Raises:
            UnmappedError: this process cannot.
        """
        version, name, plain = json.loads(shared)
        if version != torch.__version__:  # the format of what is shared differs between versions
            raise UnmappedError(f"its torch is {version}, and this worker's {torch.__version__}")
        if (device := self.find(name)) is None:
            raise UnmappedError(f"this worker does not see {name} (CUDA_VISIBLE_DEVICES)")
        fields = [base64.b64decode(each) if isinstance(each, str) else each for each in plain]
        try:
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
        except RuntimeError as error:
            raise UnmappedError(" ".join(str(error).split())[:200]) from error
        return torch.empty(0, dtype=torch.float32, device=device).set_(storage, 0, (size,))  # type: ignore[call-overload,no-any-return]

    def wait(self, device: torch.device) -> None:
        """Waits for what this process has given the GPU's current stream, and for nothing else."""
        event = torch.cuda.Event(blocking=True)  # the process leaves its core to others while it waits
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


IPC = CudaIpc()


class GpuMemory:
    """As :class:`SharedMemory`, but the vectors are on a GPU, and only the seqlock is in memory that processes share.

    Every copy is complete on the GPU before this process goes on: before a message says so, or the seqlock is read.

    Args:
        lock: shared memory without vectors.
        vectors: by worker, its slot; the published parameters are at -1.
    """

    def __init__(self, lock: SharedMemory, parameters: int, publishes: bool, vectors: dict[int, Tensor]) -> None:
        self._lock, self.parameters, self.publishes, self._vectors = lock, parameters, publishes, vectors
        self.workers, self.inode = lock.workers, lock.inode
        self.device = vectors[-1].device

    @classmethod
    def create(cls, parameters: int, workers: int, publishes: bool, device: torch.device) -> "GpuMemory":
        """Creates the server's side; :meth:`allocate_slot` allocates the workers' slots.

        Raises:
            ExchangeError: the GPU has no room for what a server keeps there, which begins with the first update.
        """
        needed, free = 4 * parameters * (_VECTORS + workers), IPC.free_bytes(device)
        if needed > free:
            raise ExchangeError(
                f"no room on the GPU for the server: it needs {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free"
            )
        lock = SharedMemory.create(0, workers, publishes=False)
        return cls(lock, parameters, publishes, {-1: IPC.allocate(parameters if publishes else 0, device)})

    @classmethod
    def attach(cls, path: str, shared: Sequence[str], parameters: int, workers: int, worker: int) -> "GpuMemory":
        """Opens a worker's side; the arguments are the server's :attr:`path` and :meth:`shared` for this worker.

        Raises:
            UnmappedError: this process cannot map the server's memory.
        """
        slot, *published = (IPC.open(each, parameters) for each in shared)
        lock = SharedMemory.attach(path, 0, workers, publishes=False)
        return cls(lock, parameters, bool(published), {worker: slot, -1: published[0] if published else slot[:0]})

    @property
    def path(self) -> str:
        return self._lock.path

    def shared(self, worker: int) -> list[str]:
        """Returns what a worker needs to map its slot and the published parameters."""
        return [IPC.share(self._vectors[each]) for each in (worker, *[-1] * self.publishes)]

    @property
    def published(self) -> Tensor:
        assert self.publishes
        return self._vectors[-1]

    def allocate_slot(self, worker: int) -> None:
        if worker not in self._vectors:
            self._vectors[worker] = IPC.allocate(self.parameters, self.device)

    def slot(self, worker: int) -> Tensor:
        return self._vectors[worker]

    def publish(self, parameters: Tensor, version: int) -> None:
        with self._lock.publication(version):
            self.published.copy_(parameters)
            self.settle()

    def read(self, copy: Callable[[Tensor], object], gone: Callable[[], bool] = never) -> int:
        def copy_whole() -> None:
            copy(self.published)
            self.settle()

        return self._lock.while_unchanged(copy_whole, gone)

    def settle(self) -> None:
        """Waits until what this process has copied to or from the vectors is there."""
        IPC.wait(self.device)

    def close(self) -> None:
        """Lets the vectors go: a server that was started again has others."""
        self._lock.close()
        self._vectors = {}
