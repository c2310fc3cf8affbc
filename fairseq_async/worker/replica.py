"""A worker's own copy of the parameters, as its optimizer keeps them, and copies between it and the flat slot."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fairseq_async.exchange import unpack
from fairseq_async.exchange.copying import copy_fused
from fairseq_async.exchange.devices import PLAIN, Device, device_of
from fairseq_async.protocol import Layout


class Replica(Protocol):
    """A worker's parameters θ, as local SGD uses them.

    ``flat`` is an fp32 vector of the layout's size, in memory or on the model's device.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def named(self) -> Sequence[tuple[str, Tensor]]:
        """The tensors of θ here, with the names of their parameters."""
        ...

    @property
    def device(self) -> Device:
        """Device of the parameters that :meth:`read` and :meth:`subtract` copy from."""
        ...

    def read(self, flat: Tensor, shared: bool = False) -> None:
        """flat ← θ; ``shared`` says that all ranks of the worker read into the same vector."""
        ...

    def subtract(self, flat: Tensor) -> None:
        """flat ← flat − θ: the pseudo-gradient, if flat held the parameters that the local steps started from."""
        ...

    def write(self, flat: Tensor) -> None:
        """θ ← flat"""
        ...

    def part(self, tensors: slice) -> "Replica":
        """Returns a replica of the same model that has only these tensors of the layout."""
        ...


class TensorReplica:
    """The replica of a model whose own parameters are in fp32 where an optimizer steps them; on any device.

    Args:
        is_writer: whether this rank writes its parameters into what the ranks of a worker share; of several ranks with
            the same ones, one does.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], is_writer: bool = True) -> None:
        self.layout = Layout.of(named)
        self.named, self._tensors = named, [tensor for _, tensor in named]
        self._is_writer = is_writer
        self.device = device_of(self._tensors)

    def read(self, flat: Tensor, shared: bool = False) -> None:
        if self._is_writer or not shared:
            between(self.device, flat).begin(flat, self._tensors).synchronize()

    def subtract(self, flat: Tensor) -> None:
        if self._is_writer:
            local = between(self.device, flat).fetch(self._tensors)
            for view, tensor in zip(self.layout.views(flat), local, strict=True):
                view.sub_(tensor.detach().to(view))

    def write(self, flat: Tensor) -> None:
        unpack(self._tensors, between(self.device, flat).upload(flat))

    def part(self, tensors: slice) -> "TensorReplica":
        return TensorReplica(self.named[tensors], self._is_writer)


class MasterReplica:
    """The replica of a model with low-precision parameters: their fp32 masters, of which this rank may hold a part.

    Args:
        named: the whole low-precision parameters, with their names.
        masters: for each parameter, the offset of this rank's part in it and that part's flat fp32 master; None where
            this rank has no part of it.
        is_writer: whether this rank writes its part into what the ranks share; of several with the same part, one does.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], masters: Sequence[tuple[int, Tensor] | None], is_writer: bool = True
    ) -> None:
        self._is_writer = is_writer
        self.layout = Layout.of(named)
        self._named, self._given = named, masters
        self._parameters = [tensor for _, tensor in named]
        self._held = [None if given is None else given[0] for given in masters]
        self.named = [(name, given[1]) for (name, _), given in zip(named, masters, strict=True) if given is not None]
        self._masters = [master for _, master in self.named]
        self.device = device_of(self._masters)
        # with an offloaded optimizer, the masters are in memory and the parameters on a GPU
        same = {master.device for master in self._masters} == {each.device for each in self._parameters}
        self._parameter_device = self.device if same else device_of(self._parameters)

    def read(self, flat: Tensor, shared: bool = False) -> None:
        for part, local in self._local_parts(flat, shared):
            part.copy_(local.detach())

    def subtract(self, flat: Tensor) -> None:
        for part, local in self._local_parts(flat):
            part.sub_(local.detach().to(part))

    def write(self, flat: Tensor) -> None:
        """Writes this rank's parts of the masters, and every parameter whole, so that no rank has to gather one."""
        near = between(self._parameter_device, flat).upload(flat)
        copy_fused(self._masters, self._parts(near if self.device is self._parameter_device else flat))
        copy_fused(self._parameters, list(self.layout.views(near)))

    def strayed(self) -> str | None:
        """Returns the name of a parameter that is not its master, rounded; None if there is none."""
        for (name, parameter), given in zip(self._named, self._given, strict=True):
            if given is not None:
                start, master = given
                part = parameter.detach().reshape(-1)[start : start + master.numel()]
                if not torch.equal(part, master.detach().to(part)):
                    return name
        return None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Sets each parameter, where this rank has a part of its master, to that, rounded."""
        for (_, parameter), given in zip(self._named, self._given, strict=True):
            if given is not None:
                start, master = given
                flat = parameter.detach().reshape(-1)
                flat[start : start + master.numel()] = master.to(flat)
                parameter.copy_(flat.view(parameter.shape))

    def part(self, tensors: slice) -> "MasterReplica":
        return MasterReplica(self._named[tensors], self._given[tensors], self._is_writer)

    def _local_parts(self, flat: Tensor, shared: bool = True) -> Iterable[tuple[Tensor, Tensor]]:
        """Pairs of a view of ``flat`` and this rank's master for it, in memory or on the device as ``flat`` is; none
        if this rank is no writer of what is shared."""
        if shared and not self._is_writer:
            return []
        return zip(self._parts(flat), between(self.device, flat).fetch(self._masters), strict=True)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        views = [view.view(-1) for view in self.layout.views(flat)]
        held = [(view, start) for view, start in zip(views, self._held, strict=True) if start is not None]
        return [
            view.narrow(0, start, master.numel()) for (view, start), master in zip(held, self._masters, strict=True)
        ]


def between(device: Device, flat: Tensor) -> Device:
    """Returns the device that copies between ``flat`` and the model: :data:`PLAIN` where ``flat`` is not in memory."""
    return device if flat.is_cpu else PLAIN
