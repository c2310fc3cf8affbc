"""A worker's own copy of the parameters, as its optimizer keeps them, beside the flat vector of the exchange."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fairseq_async.exchange import pack, unpack
from fairseq_async.server import Layout


class Replica(Protocol):
    """What local SGD asks of a model. ``flat`` is fp32 and of the layout's size."""

    @property
    def layout(self) -> Layout: ...

    def read(self, flat: Tensor) -> None:
        """flat ← θ"""
        ...

    def subtract(self, flat: Tensor) -> None:
        """flat ← flat − θ: the pseudo-gradient, where flat holds the parameters that the local steps started from."""
        ...

    def write(self, flat: Tensor) -> None:
        """θ ← flat"""
        ...


class TensorReplica:
    """Parameters as the model has them, on any device: those that an optimizer steps are in fp32.

    Args:
        speaks: whether this rank hands them over; of several that hold the same, one does.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], speaks: bool = True) -> None:
        self.layout = Layout.of(named)
        self._tensors = [tensor for _, tensor in named]
        self._speaks = speaks

    def read(self, flat: Tensor) -> None:
        if self._speaks:
            pack(flat, self._tensors)

    def subtract(self, flat: Tensor) -> None:
        for view, tensor in zip(self.layout.views(flat), self._tensors, strict=True):
            if self._speaks:
                view.sub_(tensor.detach().to(view))

    def write(self, flat: Tensor) -> None:
        unpack(self._tensors, flat)


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
        self._parameters = [tensor for _, tensor in named]
        self._masters = masters

    def read(self, flat: Tensor) -> None:
        for part, master in self._parts(flat) if self._speaks else []:
            part.copy_(master)

    def subtract(self, flat: Tensor) -> None:
        for part, master in self._parts(flat) if self._speaks else []:
            part.sub_(master.to(part))

    def write(self, flat: Tensor) -> None:
        """The masters' own parts, and every parameter whole: no rank has to gather it."""
        for part, master in self._parts(flat):
            master.copy_(part)
        with torch.no_grad():
            for view, parameter in zip(self.layout.views(flat), self._parameters, strict=True):
                parameter.copy_(view)

    def _parts(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        views = [view.view(-1) for view in self.layout.views(flat)]
        held = [(view, master) for view, master in zip(views, self._masters, strict=True) if master is not None]
        return [(view.narrow(0, start, master.numel()), master.detach()) for view, (start, master) in held]
