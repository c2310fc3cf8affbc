"""The parameters of a ZeRO-3 engine, of which each rank of an island holds a partition."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.deepspeed_plugin.compat import whole_shape
from fairseq_async.exchange.devices import device_of
from fairseq_async.protocol import Layout
from fairseq_async.protocol.layout import Segment
from fairseq_async.worker.replica import between


class PartitionedReplica:
    """ZeRO 3: this rank's partition of every fp32 master, on its device or on the CPU, and the model's parameters.

    Every parameter, flat and padded, is divided equally among the ranks. Each rank reads and writes its own part of the
    flat vector; no rank gathers a master. All ranks must call :meth:`write` together: it makes collective calls.

    Args:
        named: the model's parameters, which have no elements of their own between two steps.
        rank: of this process, in the island.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], rank: int) -> None:
        dtypes = [str(parameter.dtype).removeprefix("torch.") for _, parameter in named]
        self.layout = Layout(
            tuple(
                Segment(name, whole_shape(parameter), dtype)
                for (name, parameter), dtype in zip(named, dtypes, strict=True)
            )
        )
        self._named, self._parameters, self._rank = named, [parameter for _, parameter in named], rank
        self.device = device_of([master for _, master in self.named])

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The masters' partitions."""
        return [(name, safe_get_local_fp32_param(parameter).detach()) for name, parameter in self._named]

    def read(self, flat: Tensor, shared: bool = False) -> None:
        for part, local in self._local_parts(flat):
            part.copy_(local)

    def subtract(self, flat: Tensor) -> None:
        for part, local in self._local_parts(flat):
            part.sub_(local.to(part))

    def write(self, flat: Tensor) -> None:
        """Writes the masters' partitions, then the model's parameters one after the other: the model is never whole.

        A GPU, too, gets one parameter at a time.
        """
        for part, master, parameter in self._parts(flat):
            padded = torch.zeros_like(master)
            padded[: part.numel()].copy_(part)
            safe_set_local_fp32_param(parameter, padded)
        for view, parameter in zip(self.layout.views(flat), self._parameters, strict=True):
            with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():  # which partitions it anew
                parameter.copy_(view)

    def _local_parts(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Returns this rank's parts of ``flat``, each with the master's partition, copied to where ``flat`` is."""
        parts = [(part, master[: part.numel()]) for part, master, _ in self._parts(flat)]
        local = between(self.device, flat).fetch([held for _, held in parts])
        return zip((part for part, _ in parts), local, strict=True)

    def part(self, tensors: slice) -> "PartitionedReplica":
        return PartitionedReplica(self._named[tensors], self._rank)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Parameter]]:
        """Yields for each parameter this rank's part of ``flat``, the master's partition, and the parameter itself."""
        for view, parameter in zip(self.layout.views(flat), self._parameters, strict=True):
            master = safe_get_local_fp32_param(parameter).detach().view(-1)
            start = min(view.numel(), self._rank * master.numel())
            end = min(view.numel(), start + master.numel())
            yield view.view(-1)[start:end], master, parameter
