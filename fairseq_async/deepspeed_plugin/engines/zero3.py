"""The parameters of a ZeRO-3 engine, of which each rank of an island holds a partition, and its groups of them."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_set_local_fp32_param
from torch import Tensor
from torch.nn import Parameter

from fairseq_async.deepspeed_plugin.compat import whole_shape
from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol import Layout
from fairseq_async.protocol.layout import Segment
from fairseq_async.worker.divided import DividedReplica


class PartitionedReplica(DividedReplica):
    """ZeRO 3: this rank's partition of every fp32 master, on its device or on the CPU, and the model's parameters.

    Every parameter, flat and padded, is divided equally among the ranks. Each rank reads and writes its own part of the
    flat vector; no rank gathers a master, or a gradient. All ranks must call :meth:`write` together: it makes
    collective calls.

    Args:
        named: the model's parameters, which have no elements of their own between two steps.
        rank: of this process, in the island.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], rank: int) -> None:
        dtypes = [str(parameter.dtype).removeprefix("torch.") for _, parameter in named]
        segments = (
            Segment(name, whole_shape(parameter), dtype) for (name, parameter), dtype in zip(named, dtypes, strict=True)
        )
        layout = Layout(tuple(segments))
        self._named, self._parameters, self._rank = named, [parameter for _, parameter in named], rank
        padded = [safe_get_local_fp32_param(parameter).numel() for parameter in self._parameters]
        sizes = [segment.size for segment in layout.segments]
        starts = [min(size, rank * length) for size, length in zip(sizes, padded, strict=True)]
        self._lengths = [min(n, size - start) for n, size, start in zip(padded, sizes, starts, strict=True)]
        super().__init__(layout, starts, self._masters, self.gradients)

    def gradients(self) -> list[Tensor]:
        """Returns this rank's partition of the mean gradient over the ranks, of each parameter."""
        return self._trimmed([safe_get_local_grad(parameter) for parameter in self._parameters])

    def write(self, flat: Tensor) -> None:
        """Writes the masters' partitions, then the model's parameters one after the other: the model is never whole.

        A GPU, too, gets one parameter at a time.
        """
        for part, parameter in zip(self._places(flat, self._masters()), self._parameters, strict=True):
            padded = torch.zeros_like(safe_get_local_fp32_param(parameter).detach().view(-1))
            padded[: part.numel()].copy_(part)
            safe_set_local_fp32_param(parameter, padded)
        for view, parameter in zip(self.layout.views(flat), self._parameters, strict=True):
            with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():  # which partitions it anew
                parameter.copy_(view)

    def strayed(self) -> str | None:
        """Returns the name of a parameter of which this rank's partition is not its master, rounded; None if there is
        none."""
        for (name, parameter), master in zip(self._named, self._masters(), strict=True):
            partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]  # of DeepSpeed
            part = partition.detach().view(-1)[: master.numel()]
            if not torch.equal(part, master.to(part)):
                return name
        return None

    def part(self, tensors: slice) -> "PartitionedReplica":
        return PartitionedReplica(self._named[tensors], self._rank)

    def _masters(self) -> list[Tensor]:
        return self._trimmed([safe_get_local_fp32_param(parameter) for parameter in self._parameters])

    def _trimmed(self, partitions: Sequence[Tensor]) -> list[Tensor]:
        """Returns the partitions without what they are padded by."""
        lengths = zip(partitions, self._lengths, strict=True)
        return [partition.detach().view(-1)[:length] for partition, length in lengths]


class ShownGroups:
    """The parameter groups of the engine's own optimizer, which never steps: they show what those of the optimizer in
    the server have.

    Args:
        shown: groups of the engine's own optimizer.
        served: groups of the other one, in the same order.
    """

    def __init__(self, shown: list[dict[str, Any]], served: list[dict[str, Any]]) -> None:
        self._shown, self._served = shown, served
        self.show()

    def show(self) -> None:
        """Copies the options."""
        for shown, options in zip(self._shown, self._options(), strict=True):
            shown.update(options)

    def check(self) -> None:
        """Checks that the script has not set an option.

        Raises:
            ConfigurationError: it has.
        """
        for number, (shown, options) in enumerate(zip(self._shown, self._options(), strict=True)):
            for name, value in options.items():
                if shown.get(name) != value:
                    remedy = 'give a "scheduler" in the configuration' if name == "lr" else "leave it as it was"
                    raise ConfigurationError(
                        f'param_groups[{number}]["{name}"] of the optimizer was {value} and is {shown.get(name)} now, '
                        f"but it steps in the server: {remedy}"
                    )

    def _options(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self._served]
