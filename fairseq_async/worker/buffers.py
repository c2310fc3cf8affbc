"""A model's buffers, behind its parameters in what a worker of local SGD exchanges."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fairseq_async.errors import ConfigurationError, option
from fairseq_async.options.config import LocalSGDOptions
from fairseq_async.protocol.layout import BUFFER, NO_BUFFERS, Layout
from fairseq_async.worker.replica import Replica

_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def exchanged_buffers(model: nn.Module, options: LocalSGDOptions) -> list[tuple[str, Tensor]]:
    """Returns the floating-point buffers that the model saves, with their names, where the options ask for them.

    Raises:
        ConfigurationError: the model has no such buffers, or one that is not exact in fp32, or has no values yet.
    """
    if options.buffers == "own":
        return []
    found = list(_saved_buffers(model))
    if not found:
        raise ConfigurationError(NO_BUFFERS.format(option("buffers"), options.buffers))
    for name, buffer in found:
        if buffer.is_meta or is_lazy(buffer):
            raise ConfigurationError(
                f"the buffer {name} has no values yet (meta or lazy): give it some, or leave {option('buffers')} out"
            )
        if buffer.dtype not in _EXACT_IN_FP32:
            kind = str(buffer.dtype).removeprefix("torch.")
            raise ConfigurationError(f"the buffer {name} is {kind}: with {option('buffers')}, keep it in float32")
    return found


def with_buffers(replica: Replica, model: nn.Module, options: LocalSGDOptions, is_writer: bool = True) -> Replica:
    """Returns the replica, with the model's buffers behind its parameters where the options ask for that; raises as
    :func:`exchanged_buffers`."""
    found = exchanged_buffers(model, options)
    return _WithBuffers(replica, model, found, is_writer) if found else replica


class _WithBuffers:
    """A replica with the floating-point buffers that the model saves. Other buffers, as counts of batches, stay the
    worker's own.

    A module may have another tensor as its buffer after each step: the buffers are looked up at each exchange.

    Args:
        named: the buffers at first, with their names.
        is_writer: whether this rank writes its buffers into what the ranks of a worker share; of several, one does.
    """

    def __init__(
        self, replica: Replica, model: nn.Module, named: list[tuple[str, Tensor]], is_writer: bool = True
    ) -> None:
        self._replica, self._model, self._is_writer = replica, model, is_writer
        self.layout = Layout(replica.layout.segments + Layout.of(named, BUFFER).segments)
        self.named, self.device, self._size = replica.named, replica.device, replica.layout.size

    def read(self, flat: Tensor, shared: bool = False) -> None:
        self._replica.read(flat[: self._size], shared)
        if self._is_writer or not shared:
            for view, buffer in self._buffers(flat):
                view.copy_(buffer)

    def subtract(self, flat: Tensor) -> None:
        """Subtracts the parameters; of the buffers, ``flat`` gets 0 − b: see
        :class:`~fairseq_async.algorithms.WorkerBuffers`."""
        self._replica.subtract(flat[: self._size])
        if self._is_writer:
            for view, buffer in self._buffers(flat):
                view.copy_(buffer).neg_()

    def write(self, flat: Tensor) -> None:
        self._replica.write(flat[: self._size])
        for view, buffer in self._buffers(flat):
            buffer.copy_(view)

    def part(self, tensors: slice) -> Replica:
        raise ConfigurationError(f"{option('fragments')} and {option('buffers')} do not go together")

    def _buffers(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields for each buffer its place in ``flat``, and the tensor that is the module's now."""
        segments = [segment for segment in self.layout.segments if segment.is_buffer]
        found = dict(_saved_buffers(self._model))
        for segment, part in zip(segments, flat[self._size :].split([each.size for each in segments]), strict=True):
            buffer = found.get(segment.name)
            if buffer is None or buffer.shape != segment.shape:
                raise ConfigurationError(
                    f"the buffer {segment.name} has changed its shape, or is gone: leave {option('buffers')} out"
                )
            yield part.view(segment.shape), buffer.detach()


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the floating-point buffers that are in the model's ``state_dict``, each once."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_number = buffer.is_floating_point() or buffer.is_complex()
            if is_number and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}".lstrip(".").replace("_orig_mod.", ""), buffer
