"""Adasum across nodes, of the means over the ranks of each node."""

import socket
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_async.collective.adasum.distributed import DistributedAdasum, check_dense
from fairseq_async.errors import ConfigurationError


class NodeAdasum:
    """The mean of the ranks of each node, combined across nodes as :class:`DistributedAdasum` does.

    The first rank of each node combines and sends the result to the others of its node. The order of the nodes is
    that of their first ranks. All ranks end with the same bits.

    Every rank constructs it and calls it, in the same order as all other collective operations of these ranks: it uses
    reductions and broadcasts inside a node.

    Args:
        group: the ranks; all by default.
        node: the name of this rank's node; the host name by default.
        device: device of the small tensors that are exchanged; a GPU for NCCL.

    Raises:
        ConfigurationError: all ranks are on one node, where this would be a mean and no Adasum.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, node: str | None = None, device: torch.device | None = None
    ) -> None:
        self._device = device
        name = torch.tensor([zlib.crc32((node or socket.gethostname()).encode())], device=device)
        names = [torch.empty_like(name) for _ in range(dist.get_world_size(group))]
        dist.all_gather(names, name, group=group)
        nodes: dict[int, list[int]] = {}
        for rank, each in zip(dist.get_process_group_ranks(group), names, strict=True):
            nodes.setdefault(int(each), []).append(rank)
        if len(nodes) == 1:
            raise ConfigurationError(
                "Adasum with hierarchy node: all ranks are on one node, so they would only be averaged; "
                "leave the hierarchy out, or leave Adasum out"
            )
        own = nodes[int(name)]
        self.leader, self.size = own[0], len(own)
        # new_group is collective: all ranks make all groups in one order, also those that they are not in
        groups = [dist.new_group(ranks) for ranks in nodes.values()]
        self._inside = groups[list(nodes.values()).index(own)]
        leaders = dist.new_group([ranks[0] for ranks in nodes.values()])
        self._across = DistributedAdasum(leaders) if dist.get_rank() == self.leader else None

    def share(self, weight: float) -> float:
        """Returns the factor for this rank's sum over ``weight`` tokens with which the node's mean is one per token."""
        total = torch.tensor([weight], dtype=torch.float64, device=self._device)
        if self.size > 1:
            dist.all_reduce(total, group=self._inside)
        return self.size / float(total) if total else 0.0

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Combines in place, with the arguments and errors of :meth:`DistributedAdasum.__call__`."""
        check_dense(tensors)
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        for kind in kinds:
            self._combine([tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind])

    def _combine(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self.size)
        parts = flat.split([tensor.numel() for tensor in tensors])
        if self.size > 1:
            dist.reduce(flat, self.leader, group=self._inside)
        if self._across is not None:
            self._across(parts)
        if self.size > 1:
            dist.broadcast(flat, self.leader, group=self._inside)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
