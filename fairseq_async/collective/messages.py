"""Messages between the ranks of a group, point to point, over Gloo or NCCL."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0xADA5  # keeps these messages apart from others of the same group


class Messages:
    """What the members of a process group send each other.

    Collective operations would do in part; but the hook of DistributedDataParallel runs beside those of the model, and
    all ranks must call collective operations in one order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def start(self, partner: int, send: Sequence[Tensor] = (), receive: Sequence[Tensor] = ()) -> list[dist.Work]:
        """Contiguous tensors in both directions. The works of those that come are the first; NCCL has one for all."""
        peer = dist.get_global_rank(self._group, partner)
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group, _TAG) for tensor in receive]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group, _TAG) for tensor in send]
        return dist.batch_isend_irecv(operations) if operations else []

    def swap(self, partner: int, send: Sequence[Tensor] = (), receive: Sequence[Tensor] = ()) -> None:
        """The same, to its end."""
        wait(self.start(partner, send, receive))

    def others(self, partner: int, values: Tensor) -> Tensor:
        """The partner's values."""
        received = torch.empty_like(values)
        self.swap(partner, [values], [received])
        return received

    def everyones(self, values: Tensor) -> Tensor:
        """Every member's values in the order of ranks; few bytes, since each sends them to all."""
        received = torch.empty(self.size, *values.shape, dtype=values.dtype, device=values.device)
        received[self.rank] = values
        works = []
        for distance in range(1, self.size):
            works += self.start((self.rank + distance) % self.size, send=[values])
            works += self.start((self.rank - distance) % self.size, receive=[received[self.rank - distance]])
        wait(works)
        return received

    def meet(self) -> None:
        """Returns when every member is here."""
        self.everyones(torch.zeros(1))


def wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
