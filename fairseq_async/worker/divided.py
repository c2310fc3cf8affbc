"""The parameters of a model of which each rank of a worker holds a part."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fairseq_async.exchange import unpack
from fairseq_async.exchange.devices import device_of
from fairseq_async.protocol import Layout
from fairseq_async.worker.replica import between

_Parts: TypeAlias = Callable[[], Sequence[Tensor]]


class DividedReplica:
    """A :class:`~fairseq_async.worker.replica.Replica` of which each rank of a worker holds a part of every tensor.

    A part is a run of elements of the flat tensor; it may be empty. Each rank reads and writes its own parts of the
    flat vector that all share, so that no rank needs the whole model, nor a whole gradient.

    Args:
        layout: of the whole tensors.
        starts: for each tensor, the first element of this rank's part.
        find: returns this rank's part of each tensor, of any shape; called at each exchange, since a framework may
            replace them.
        gradients: returns this rank's part of each gradient of a step, likewise.
    """

    def __init__(self, layout: Layout, starts: Sequence[int], find: _Parts, gradients: _Parts) -> None:
        self.layout, self._starts, self._find, self._gradients = layout, starts, find, gradients
        self.device = device_of(find())

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """This rank's parts that have elements."""
        parts = zip(self.layout.segments, self._find(), strict=True)
        return [(segment.name, part) for segment, part in parts if part.numel()]

    def read(self, flat: Tensor, shared: bool = False) -> None:
        for place, part in self._local(flat, self._find()):
            place.copy_(part)

    def write_gradients(self, flat: Tensor, factor: float = 1.0) -> None:
        """This rank's parts of ``flat`` ← factor · gradients."""
        for place, part in self._local(flat, self._gradients()):
            place.copy_(part).mul_(factor)

    def subtract(self, flat: Tensor) -> None:
        for place, part in self._local(flat, self._find()):
            place.sub_(part.to(place))

    def write(self, flat: Tensor) -> None:
        parts = self._find()
        own = torch.cat(self._places(flat, parts))  # a GPU gets this rank's parts alone
        unpack(parts, between(self.device, own).upload(own))

    def part(self, tensors: slice) -> "DividedReplica":
        layout, starts = Layout(self.layout.segments[tensors]), self._starts[tensors]
        return DividedReplica(layout, starts, lambda: self._find()[tensors], lambda: self._gradients()[tensors])

    def _local(self, flat: Tensor, parts: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
        """Returns this rank's parts of ``flat``, each with its part of another vector, flat and where ``flat`` is."""
        local = between(self.device, flat).fetch(parts)
        return zip(self._places(flat, parts), (part.detach().reshape(-1) for part in local), strict=True)

    def _places(self, flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's parts of ``flat``."""
        views = zip(self.layout.views(flat), self._starts, parts, strict=True)
        return [view.view(-1).narrow(0, start, part.numel()) for view, start, part in views]
