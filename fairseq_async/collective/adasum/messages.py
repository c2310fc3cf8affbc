"""Point-to-point messages between the ranks of a process group, over Gloo or NCCL."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0xADA5  # keeps these messages apart from others of the same group


class Messages:
    """Sends tensors between the ranks of a process group, two ranks at a time.

    Collective operations are not used: the hook of DistributedDataParallel runs on a thread beside the model's own
    collective operations, and all ranks would have to call both kinds in one common order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def start(self, partner: int, send: Sequence[Tensor] = (), receive: Sequence[Tensor] = ()) -> list[dist.Work]:
        """Starts to send and receive contiguous tensors, and returns the pending operations.

        The partner must list as many tensors of the same sizes, in the same order. The first operations returned are
        those of ``receive``, in its order; NCCL returns a single one for all.
        """
        peer = dist.get_global_rank(self._group, partner)
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group, _TAG) for tensor in receive]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group, _TAG) for tensor in send]
        return dist.batch_isend_irecv(operations) if operations else []

    def exchange(self, partner: int, send: Sequence[Tensor] = (), receive: Sequence[Tensor] = ()) -> None:
        """Sends and receives as :meth:`start` does, and waits for the end."""
        wait(self.start(partner, send, receive))

    def partner_values(self, partner: int, values: Tensor) -> Tensor:
        """Sends ``values`` to the partner and returns those that it sent here."""
        received = torch.empty_like(values)
        self.exchange(partner, [values], [received])
        return received

    def all_gather(self, values: Tensor) -> Tensor:
        """Returns every rank's values in the order of ranks; for few bytes, since each rank sends to every other."""
        received = torch.empty(self.size, *values.shape, dtype=values.dtype, device=values.device)
        received[self.rank] = values
        works = []
        for distance in range(1, self.size):
            works += self.start((self.rank + distance) % self.size, send=[values])
            works += self.start((self.rank - distance) % self.size, receive=[received[self.rank - distance]])
        wait(works)
        return received

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather(torch.zeros(1))


def wait(works: Sequence[dist.Work]) -> None:
    """Waits for all of these operations."""
    for work in works:
        work.wait()
