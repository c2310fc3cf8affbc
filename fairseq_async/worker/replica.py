"""A worker's own copy of the parameters, as its optimizer keeps them, beside the flat vector of the exchange."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from fairseq_async.exchange import unpack
from fairseq_async.exchange.copying import copy_fused
from fairseq_async.exchange.devices import PLAIN, Device, device_of
from fairseq_async.server import Layout


class Replica(Protocol):
    """What local SGD asks of a model. ``flat`` is fp32 and of the layout's size, in memory or beside the model."""

    @property
    def layout(self) -> Layout: ...

    @property
    def device(self) -> Device:
        """Where the parameters are that :meth:`read` and :meth:`subtract` take."""
        ...

    def read(self, flat: Tensor) -> None:
        """flat ← θ"""
        ...

    def subtract(self, flat: Tensor) -> None:
        """flat ← flat − θ: the pseudo-gradient, where flat holds the parameters that the local steps started from."""
        ...

    def write(self, flat: Tensor) -> None:
        """θ ← flat"""
        ...

    def part(self, tensors: slice) -> "Replica":
        """A replica of these tensors of the layout alone, of the same model."""
        ...


class TensorReplica:
    """Parameters as the model has them, on any device: those that an optimizer steps are in fp32.

    Args:
        speaks: whether this rank hands them over; of several that hold the same, one does.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], speaks: bool = True) -> None:
        self.layout = Layout.of(named)
        self._named, self._tensors = named, [tensor for _, tensor in named]
        self._speaks = speaks
        self.device = device_of(self._tensors)

    def read(self, flat: Tensor) -> None:
        if self._speaks:
            between(self.device, flat).begin(flat, self._tensors).synchronize()

    def subtract(self, flat: Tensor) -> None:
        if self._speaks:
            local = between(self.device, flat).fetch(self._tensors)
            for view, tensor in zip(self.layout.views(flat), local, strict=True):
                view.sub_(tensor.detach().to(view))

    def write(self, flat: Tensor) -> None:
        unpack(self._tensors, between(self.device, flat).upload(flat))

    def part(self, tensors: slice) -> "TensorReplica":
        return TensorReplica(self._named[tensors], self._speaks)


class MasterReplica:
    """fp32 masters of low-precision parameters, of which this rank may hold a part.

    Args:
        named: the low-precision parameters, whole.
        masters: for each parameter the place of this rank's part in it and that part's fp32 master, flat; or None.
        speaks: whether this rank hands its part over; of several that hold the same, one does.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], masters: Sequence[tuple[int, Tensor] | None], speaks: bool = True
    ) -> None:
        self._speaks = speaks
        self.layout = Layout.of(named)
        self._named, self._given = named, masters
        self._parameters = [tensor for _, tensor in named]
        self._held = [None if given is None else given[0] for given in masters]
        self._masters = [given[1] for given in masters if given is not None]
        self.device = device_of(self._masters)
        # where an optimizer is offloaded, its masters are in memory and the parameters on a GPU
        same = {master.device for master in self._masters} == {each.device for each in self._parameters}
        self._parameter_device = self.device if same else device_of(self._parameters)

    def read(self, flat: Tensor) -> None:
        for part, local in self._local_parts(flat):
            part.copy_(local.detach())

    def subtract(self, flat: Tensor) -> None:
        for part, local in self._local_parts(flat):
            part.sub_(local.detach().to(part))

    def write(self, flat: Tensor) -> None:
        """The masters' own parts, and every parameter whole: no rank has to gather it."""
        near = between(self._parameter_device, flat).upload(flat)
        copy_fused(self._masters, self._parts(near if self.device is self._parameter_device else flat))
        copy_fused(self._parameters, list(self.layout.views(near)))

    def part(self, tensors: slice) -> "MasterReplica":
        return MasterReplica(self._named[tensors], self._given[tensors], self._speaks)

    def _local_parts(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """The places of this rank's masters in ``flat``, and the masters where that is; none if it does not speak."""
        if not self._speaks:
            return []
        return zip(self._parts(flat), between(self.device, flat).fetch(self._masters), strict=True)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        views = [view.view(-1) for view in self.layout.views(flat)]
        held = [(view, start) for view, start in zip(views, self._held, strict=True) if start is not None]
        return [
            view.narrow(0, start, master.numel()) for (view, start), master in zip(held, self._masters, strict=True)
        ]


def between(device: Device, flat: Tensor) -> Device:
    """How ``flat`` and a model on this device are copied to each other: plainly, where ``flat`` is not in memory."""
    return device if flat.is_cpu else PLAIN
